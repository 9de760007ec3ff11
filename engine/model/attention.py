"""The attention function that the engine gives to transformers: keys and values live in the paged cache.

A model made with `attn_implementation=ATTENTION_NAME` calls `paged_attention_forward` in every layer, with what the
layer itself knows (scale, window, soft-cap, sinks) and with the step's `PagedInputs`, which the runner hands to the
model's `forward` as a keyword argument and which the model passes on. No mask function is registered under that name,
so transformers makes no masks: causality and windows are kept here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from engine.kernels import AttentionOptions, Kernels
from engine.kv.storage import KVStorage

ATTENTION_NAME = "chairlift_paged"
METADATA_LOST = "its layers do not pass keyword arguments on to the attention"

UNDERSTOOD = frozenset({"sliding_window", "softcap", "s_aux", "is_causal"}) | frozenset(
    # these change nothing in inference: dropout is 0 in eval mode, the rest is the model's own business
    {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Keyword arguments of an attention call that are honoured. Others are refused: they would change the result, perhaps
only for sequences longer than those that are tried out at load (sparse attention does)."""


class Unsupported(Exception):
    """The model wants something of its attention that is not done here. The text is a clause (`families.refusal`)."""


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """What every layer's attention needs to know about a step. Valid during that step only."""

    slots: Tensor
    """int64 [T]: where in the cache each packed token's key and value go."""
    plan: Any
    """What the kernels made of the step's rows (`Kernels.plan_attention`)."""
    storage: KVStorage
    kernels: Kernels


def register() -> None:
    """Make the attention function known to transformers. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def paged_attention_forward(  # noqa: PLR0913, PLR0917 - transformers' signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    paged_inputs: PagedInputs | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the step's keys and values, then attend to the cache.

    query [1, H, T, key_dim], key [1, G, T, key_dim], value [1, G, T, value_dim]; returns [1, T, H, value_dim].
    Raises Unsupported when the model asks for something that this attention does not do, or lost the metadata.
    """
    options = attention_options(module, query, attention_mask, scaling, kwargs)
    if paged_inputs is None:
        raise Unsupported(METADATA_LOST)
    layer = layer_index(module)
    k_cache, v_cache = paged_inputs.storage.keys[layer], paged_inputs.storage.values[layer]
    kernels = paged_inputs.kernels
    kernels.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), k_cache, v_cache, paged_inputs.slots)
    output = kernels.paged_attention(query[0].transpose(0, 1), k_cache, v_cache, paged_inputs.plan, options)
    return output.unsqueeze(0), None


def layer_index(module: nn.Module) -> int:
    """Which layer of the cache an attention module writes to."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise Unsupported("its attention modules do not know their layer")
    return index


def attention_options(
    module: nn.Module, query: Tensor, attention_mask: Tensor | None, scaling: float | None, kwargs: dict[str, Any]
) -> AttentionOptions:
    """How this layer attends, from what it passes to its attention function.

    Raises Unsupported for what the paged attention does not do.
    """
    if attention_mask is not None:
        raise Unsupported("it builds attention masks of its own")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise Unsupported("its attention is not causal")
    strange = [name for name, value in kwargs.items() if value is not None and name not in UNDERSTOOD]
    if strange:
        raise Unsupported(f"its attention takes {', '.join(sorted(strange))}, which is not done here")
    window = kwargs.get("sliding_window")
    return AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=None if window is None else int(window),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
