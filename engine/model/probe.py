"""At load: find out how each layer attends, and prove that the model is right with the paged attention.

Nothing is guessed from names in the config. A forward pass with a recording attention function *discovers* the layers.
Then two short sequences go through the paged attention, packed and in chunks, and their logits are compared with those
of the model's own attention. So a model that keeps state beside the attention, adds biases, mixes packed sequences, or
attends in a way that `attention` does not know is refused here, and never wrong later.

Windows longer than the sequences are shrunk meanwhile, so that the comparison reaches past them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.kernels import Kernels
from engine.kv.storage import KVCapacity, KVStorage, LayerSpec
from engine.model.attention import ATTENTION_NAME, METADATA_LOST, Unsupported, attention_options, layer_index
from engine.model.batch import pack_step
from engine.model.families import FIXED_ATTENTION, refusal
from engine.model.forward import PagedForward
from engine.params import SamplingParams
from engine.plan import PlanRow, StepPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

RECORDER_NAME = "chairlift_recorder"
BLOCK_SIZE = 16
LENGTHS = (48, 24)
"""Tokens of the two sequences."""
SHRUNK_WINDOW = 12
TOLERANCE_EXACT = 1e-3
"""Largest deviation of any position's logits, in float32: far above rounding, far below any mistake."""
TOLERANCE_ROUGH = 0.25
"""Largest *median* deviation of each stretch, in 16-bit types, where rounding may send single tokens to other experts.
Measured on SmolLM2 in bfloat16: 0.05; a window, sinks or a mask that are not honoured: 0.8 and more."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How one layer attends, as it was seen to."""

    num_heads: int
    spec: LayerSpec
    window: int | None
    softcap: float | None
    has_sinks: bool


def probe_model(model: PreTrainedModel, kernels: Kernels, max_model_len: int) -> tuple[AttentionLayer, ...]:
    """The model's layers, by index; afterwards the model attends to the paged cache.

    `model` is in eval mode on its device, with its own (eager) attention; sequences will have up to `max_model_len`
    tokens. Raises ModelError when it cannot be served.
    """
    with _shrunk_windows(model, max_model_len):
        expected = _guard(model, lambda: _own_logits(model))
        shrunk = _guard(model, lambda: _discover(model))
        if any(layer.window is not None and LENGTHS[0] <= layer.window < max_model_len for layer in shrunk):
            raise refusal(model.config.model_type, "the windows of its layers cannot be tried out")
        actual = _guard(model, lambda: _paged_logits(model, kernels, shrunk, max_model_len))
    _compare(model, expected, actual)
    layers = _guard(model, lambda: _discover(model))
    _guard(model, lambda: _use_attention(model, ATTENTION_NAME))
    return layers


def _guard(model: PreTrainedModel, run: Callable[[], T]) -> T:
    """Run part of the probe; whatever the model's code raises is a reason to refuse it."""
    try:
        return run()
    except Unsupported as error:
        raise refusal(model.config.model_type, str(error)) from error
    except torch.OutOfMemoryError as error:
        raise ModelError(f"out of memory on {model.device} while trying the model out", setting="device") from error
    except Exception as error:
        text = " ".join(str(error).split())
        raise refusal(model.config.model_type, f"trying it out failed: {type(error).__name__}: {text}") from error


def _use_attention(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise Unsupported(FIXED_ATTENTION)


# What the layers do


def _record(  # noqa: PLR0913, PLR0917 - transformers' signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_record: list[tuple[int, AttentionLayer]] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function that writes down how it was called, and attends to nothing."""
    options = attention_options(module, query, attention_mask, scaling, kwargs)
    if attention_record is None:
        raise Unsupported(METADATA_LOST)
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    spec = LayerSpec(num_kv_heads, key_dim=key.shape[-1], value_dim=value.shape[-1])
    if value.shape[1] != num_kv_heads or num_heads % num_kv_heads:
        raise Unsupported(f"{num_heads} query heads share {num_kv_heads} key and {value.shape[1]} value heads")
    has_sinks = options.sinks is not None
    layer = AttentionLayer(num_heads, spec, options.window, options.softcap, has_sinks)
    attention_record.append((layer_index(module), layer))
    return value.new_zeros(1, query.shape[2], num_heads, value.shape[-1]), None


@torch.inference_mode()
def _discover(model: PreTrainedModel) -> tuple[AttentionLayer, ...]:
    """How each layer attends, by index: each must do so exactly once, and hand on what it is given."""
    from transformers import AttentionInterface

    AttentionInterface.register(RECORDER_NAME, _record)
    _use_attention(model, RECORDER_NAME)
    record: list[tuple[int, AttentionLayer]] = []
    token_ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    position_ids = torch.arange(2, device=model.device).unsqueeze(0)
    model(input_ids=token_ids, position_ids=position_ids, use_cache=False, attention_record=record)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(index for index, _ in record) != list(range(num_layers)):
        raise Unsupported(f"not each of its {num_layers} layers attends exactly once (some keep state of another kind)")
    return tuple(layer for _, layer in sorted(record, key=lambda entry: entry[0]))


# What comes of it


def _sequences(model: PreTrainedModel) -> list[list[int]]:
    """Two sequences of random tokens, the same at every start."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.inference_mode()
def _own_logits(model: PreTrainedModel) -> list[Tensor]:
    """Logits [length, vocab_size] of each sequence by the model's own attention, whole and alone."""
    return [
        model(input_ids=torch.tensor([sequence], device=model.device), use_cache=False).logits[0]
        for sequence in _sequences(model)
    ]


@torch.inference_mode()
def _paged_logits(
    model: PreTrainedModel, kernels: Kernels, layers: Sequence[AttentionLayer], max_model_len: int
) -> list[Tensor]:
    """The same by the paged attention: in several steps, both sequences in one step, and single tokens at the end.

    Each step has a third row, whose one token claims to stand at the last position of all: what the model makes of
    the others must not depend on how long their neighbours are.
    """
    _use_attention(model, ATTENTION_NAME)
    forward = PagedForward(model, kernels, {layer.window for layer in layers}, model.device)
    tables = ((4, 0, 3), (1, 2), (5,))
    capacity = KVCapacity(num_blocks=6, block_size=BLOCK_SIZE)
    specs = [layer.spec for layer in layers]
    storage = KVStorage.allocate(specs, capacity, model.dtype, model.device, kernels.empty_cache)
    sequences = [*_sequences(model), [0]]
    steps = ((0, 20), (0, 0), (0, 1)), ((20, 47), (0, 23), (0, 1)), ((47, 48), (23, 24), (0, 1))
    pieces: list[list[Tensor]] = [[], [], []]
    for step in steps:
        rows = [
            PlanRow(i, sequences[i][start:stop], start, tables[i], SamplingParams())
            for i, (start, stop) in enumerate(step)
            if stop > start
        ]
        arrays = pack_step(StepPlan(tuple(rows)), BLOCK_SIZE)
        arrays.position_ids[-1] = max_model_len - 1
        logits = forward(arrays.with_all_logits(), storage)
        for row, first in zip(rows, arrays.rows.query_starts, strict=False):
            pieces[row.request_id].append(logits[first : first + len(row.token_ids)])
    return [torch.cat(parts) for parts in pieces[:2]]


def _compare(model: PreTrainedModel, expected: Sequence[Tensor], actual: Sequence[Tensor]) -> None:
    """Refuse the model unless both ways give the same logits, up to rounding."""
    model_type = model.config.model_type
    if not all(torch.isfinite(logits).all() for logits in expected):
        raise ModelError(
            f"the model computes logits that are not finite in {str(model.dtype).removeprefix('torch.')}",
            setting="dtype",
            hint="try another dtype; float32 has the largest range",
        )
    for want, got in zip(expected, actual, strict=True):
        off = deviation(want.float(), got.float())
        if model.dtype == torch.float32:
            agrees = bool(off.max() <= TOLERANCE_EXACT)
        else:
            agrees = all(stretch.median() <= TOLERANCE_ROUGH for stretch in off.chunk(3))
        if not agrees:
            raise refusal(
                model_type,
                "its logits in a packed step with the paged attention are not those of its own "
                f"(off by {off.max():.2g} of their spread)",
            )


def deviation(want: Tensor, got: Tensor) -> Tensor:
    """[length]: how far each position's logits are off, in units of their spread. NaN counts as infinitely far."""
    spread = (want - want.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return torch.nan_to_num((got - want).norm(dim=-1) / spread, nan=torch.inf)


# How long the windows are


@contextmanager
def _shrunk_windows(model: PreTrainedModel, max_model_len: int) -> Iterator[None]:
    """Make windows that are longer than the sequences so short that the sequences pass them.

    Both sides of the comparison read them anew: masks from the configs, attention modules from themselves. A window
    that no request outgrows is left alone.
    """
    holders: dict[int, Any] = {}
    for module in model.modules():
        holders |= {id(holder): holder for holder in (module, getattr(module, "config", None))}
    shrunk = [
        (holder, window)
        for holder in holders.values()
        if isinstance(window := getattr(holder, "sliding_window", None), int) and SHRUNK_WINDOW < window < max_model_len
    ]
    try:
        for holder, _ in shrunk:
            holder.sliding_window = SHRUNK_WINDOW
        yield
    finally:
        for holder, window in shrunk:
            holder.sliding_window = window
