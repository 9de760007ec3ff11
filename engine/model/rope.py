"""Rotary embeddings that depend on the longest sequence of a batch, made to depend on nothing but the position.

transformers chooses the frequencies of "dynamic" (NTK) and "longrope" embeddings anew in each forward pass, by the
largest position in it. In a packed step that would make a request's output depend on its neighbours, and its own cached
keys disagree with its later ones. So they are fixed once, for the context length that is served. What depends on the
position alone can be computed once, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MAX_TABLE_BYTES = 128 << 20
"""Of the angles of all positions: 128 Ki of them with 128 dims in float32."""


def changes_with_length(rope_type: str) -> bool:
    """Whether transformers chooses this type's frequencies by the length of the batch."""
    return rope_type == "longrope" or "dynamic" in rope_type


def short_range(config: Any) -> int | None:
    """Context length up to which such embeddings are as the model was first trained; None without any.

    `config` is a transformers text config. It is the context served unless a longer one is asked for: that would make
    short requests a little worse, since they then use the frequencies of long ones too.
    """
    limits: list[int] = []
    for parameters in _parameters(config):
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "longrope":
            limits.append(int(parameters["original_max_position_embeddings"]))
        elif changes_with_length(rope_type):
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)


def pin_rope(model: PreTrainedModel, max_model_len: int) -> None:
    """Fix the frequencies for a context of `max_model_len` tokens, for all requests alike."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and changes_with_length(rope_type):
            _pin(module, rope_type, max_model_len, layer_type=None)
            module.rope_type = "default"
        elif isinstance(rope_type, dict):
            for layer_type, name in rope_type.items():
                if changes_with_length(name):
                    _pin(module, name, max_model_len, layer_type)
                    rope_type[layer_type] = "default"


def tabulate(rotary: nn.Module, max_model_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """cos and sin [max_model_len, rotary_dim] of a rotary embedding, to be looked up instead of computed in every step.

    None if that would take too much memory.
    """
    hidden = torch.empty(0, dtype=dtype)
    rotary_dim = rotary(hidden, torch.zeros(1, 1, dtype=torch.int64))[0].shape[-1]
    if 2 * max_model_len * rotary_dim * hidden.itemsize > MAX_TABLE_BYTES:
        return None
    cos, sin = rotary(hidden, torch.arange(max_model_len).unsqueeze(0))
    return cos[0].to(dtype).contiguous(), sin[0].to(dtype).contiguous()


def _pin(module: nn.Module, rope_type: str, max_model_len: int, layer_type: str | None) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    old = getattr(module, f"{prefix}inv_freq")
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, torch.device("cpu"), seq_len=max_model_len, layer_type=layer_type
    )
    module.register_buffer(f"{prefix}inv_freq", inv_freq.to(old.device), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)


def _parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The config's RoPE parameters: one set, or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (each for each in parameters.values() if isinstance(each, dict))
