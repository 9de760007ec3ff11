"""Replace a loaded model's modules by fused ones that run in the C kernels, each proved on numbers first.

One forward pass is watched: what each decoder layer got, what it gave, and how it called the attention function. A
fused layer must give the same for the same, up to rounding, or the original stays and a warning names it. Positions in
that pass are spread over the whole context length, so that what depends on the position shows. Then layers that follow
each other directly are joined, so that all of them are one call into C.

What is no such layer still has its linear layers, norms and embedding replaced. The originals' weights are freed as it
goes: weights exist once, packed, and a tied embedding is read from the output layer's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.kernels import AttentionOptions, Kernels, PackedRows
from engine.kernels.cpu.decoder import DecoderLayer, Ends, Rotation
from engine.kernels.cpu.linear import PackedLinear, can_pack
from engine.kv.storage import KVCapacity, KVStorage, LayerSpec
from engine.model.batch import StepArrays, pack_step
from engine.model.direct import DirectForward, find_direct_forward
from engine.model.forward import make_forward
from engine.model.fused import FusedLayers, FusedLinear, FusedNorm, FusedPass, JoinedLayer, SharedEmbedding
from engine.model.probe import TOLERANCE_EXACT, TOLERANCE_ROUGH, deviation
from engine.model.rope import tabulate
from engine.model.structure import SeenAttention, Unfusable, is_close, pack_module, read_layer, read_norm
from engine.params import SamplingParams
from engine.plan import PlanRow, StepPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
LENGTHS = (21, 8)
"""Tokens of the two sequences of the watched pass."""
TOLERANCE_INT8 = 0.5
"""Largest median deviation with int8 weights, from the logits of the model's own: of random tokens, far apart, which
makes much of little. Measured on SmolLM2, with several sets of tokens: 0.15 to 0.35; of logits that have nothing in
common: 1.4."""


def fuse_model(
    model: PreTrainedModel, kernels: Kernels, specs: Sequence[LayerSpec], max_model_len: int, *, int8: bool = False
) -> None:
    """Fuse what can be fused, in place. `model` attends to the paged cache; `kernels` are the CPU's.

    Raises ModelError when the model no longer gives the logits that it gave before.
    """
    trial = _Trial(model, kernels, specs, max_model_len)
    layers, called, expected = trial.watch()
    fused = {}
    for name in list(layers):
        layer = _fuse_layer(model, name, layers.pop(name), int8=int8)
        if layer is not None:
            fused[name] = layer
    _join(model, fused)
    _fuse_rest(model, called, int8=int8)
    _, _, actual = trial.watch()
    off = deviation(expected.float(), actual.float())
    if int8:
        is_right = off.median() <= TOLERANCE_INT8
    elif trial.dtype == torch.float32:
        is_right = off.max() <= TOLERANCE_EXACT
    else:
        is_right = off.median() <= TOLERANCE_ROUGH
    if not is_right:
        raise ModelError(
            f"{model.config.model_type} models come out wrong with fused modules", setting="fuse", hint="use --no-fuse"
        )
    _shorten(model, trial, actual)


@dataclass(slots=True)
class _SeenLayer:
    """A decoder layer in the watched pass."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attention: list[SeenAttention]
    output: Any = None


@dataclass(frozen=True, slots=True)
class _FusedLayer:
    layer: DecoderLayer
    input: Any
    output: Any
    position_embeddings: Any


class _WatchedKernels:
    """Kernels that write down how each layer attends."""

    choose_tokens = None

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.NAME = kernels.NAME
        self.storage: KVStorage | None = None
        self.seen: list[SeenAttention] = []

    def plan_attention(self, rows: PackedRows, windows: Collection[int | None], device: torch.device) -> Any:
        return self._kernels.plan_attention(rows, windows, device)

    def cache_dtypes(self, dtype: torch.dtype) -> Collection[torch.dtype]:
        return self._kernels.cache_dtypes(dtype)

    def empty_cache(self, *shape: Any) -> tuple[Tensor, Tensor]:
        return self._kernels.empty_cache(*shape)

    def write_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        self._kernels.write_kv(key, value, k_cache, v_cache, slots)

    def paged_attention(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, options: AttentionOptions
    ) -> Tensor:
        output = self._kernels.paged_attention(query, k_cache, v_cache, plan, options)
        assert self.storage is not None
        index = next(i for i, keys in enumerate(self.storage.keys) if keys is k_cache)
        heads = (query.shape[1], k_cache.shape[1], query.shape[2], output.shape[2])
        self.seen.append(SeenAttention(index, *heads, options))
        return output


class _Trial:
    """Two short sequences of random tokens in one step, at positions all over the context."""

    def __init__(
        self, model: PreTrainedModel, kernels: Kernels, specs: Sequence[LayerSpec], max_model_len: int
    ) -> None:
        self.dtype = model.dtype
        self.max_model_len = max_model_len
        self._model = model
        self._kernels = _WatchedKernels(kernels)
        self._specs = specs
        self._step = _trial_step(model, max_model_len)

    def watch(self) -> tuple[dict[str, _SeenLayer], set[str], Tensor]:
        """The decoder layers as they were called, by name; the linear layers that were called at all (some models
        use the weight of one in their own way); and the logits [tokens, vocab_size].
        """
        capacity = KVCapacity(num_blocks=4, block_size=BLOCK_SIZE)
        storage = KVStorage.allocate(self._specs, capacity, self.dtype, self._model.device, self._kernels.empty_cache)
        self._kernels.storage = storage
        seen: dict[str, _SeenLayer] = {}
        called: set[str] = set()
        hooks = [
            module.register_forward_hook(lambda *_, name=name: called.add(name))
            for name, module in self._model.named_modules()
            if type(module) is nn.Linear
        ]
        hooks += [
            hook
            for name, module in self._model.named_modules()
            if {"self_attn", "mlp"} <= dict(module.named_children()).keys()
            for hook in self._hooks(name, seen, module)
        ]
        try:
            forward = make_forward(self._model, self._kernels, {None}, self._model.device)
            logits = forward(self._step, storage)
        finally:
            for hook in hooks:
                hook.remove()
        return seen, called, logits.clone()

    def _hooks(self, name: str, seen: dict[str, _SeenLayer], module: nn.Module) -> list[Any]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._kernels.seen = []
            seen[name] = _SeenLayer(module, args, kwargs, self._kernels.seen)

        def after(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
            seen[name].output = output

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]


def _trial_step(model: PreTrainedModel, max_model_len: int) -> StepArrays:
    generator = np.random.default_rng(0)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    rows = tuple(
        PlanRow(i, generator.integers(vocab_size, size=length).tolist(), 0, (2 * i, 2 * i + 1), SamplingParams())
        for i, length in enumerate(LENGTHS)
    )
    step = pack_step(StepPlan(rows), BLOCK_SIZE).with_all_logits()
    step.position_ids[:] = np.sort(generator.integers(max_model_len, size=step.num_tokens))
    return step


@torch.inference_mode()
def _fuse_layer(model: PreTrainedModel, name: str, seen: _SeenLayer, *, int8: bool) -> _FusedLayer | None:
    """Put a fused layer in a layer's place, if it computes the same. None when the original stays."""
    hidden = seen.args[0] if seen.args else seen.kwargs.get("hidden_states")
    if len(seen.attention) != 1 or not isinstance(hidden, Tensor) or not isinstance(seen.output, Tensor):
        return None
    angles = seen.kwargs.get("position_embeddings")
    try:
        unrotated = read_layer(seen.module, seen.attention[0], int8=int8)
    except Unfusable:
        return None
    kwargs = {name: value for name, value in seen.kwargs.items() if name != "hidden_states"}
    rotations: tuple[Rotation, ...] = ("halves", "pairs", "none") if angles is not None else ("none",)
    for rotation in rotations:
        layer = replace(unrotated, rotation=rotation)
        fused = FusedLayers([layer])
        got = fused(hidden, **kwargs)
        if _is_same_layer(got.float(), seen.output.float(), hidden, int8=int8):
            model.set_submodule(name, fused)
            return _FusedLayer(layer, hidden, seen.output, angles)
    logger.warning("%s stays as it is: fused, it computes something else", name)
    return None


def _is_same_layer(got: Tensor, wanted: Tensor, hidden: Tensor, *, int8: bool) -> bool:
    """Compare what was added to the residual stream; the stream itself may be far larger, and so is its rounding."""
    exact = hidden.dtype == torch.float32
    tolerance = 0.1 if int8 else 1e-4 if exact else 0.03
    rounding = torch.finfo(hidden.dtype).eps * wanted.norm()
    return bool((got - wanted).norm() <= tolerance * (wanted - hidden.float()).norm() + rounding)


def _join(model: PreTrainedModel, fused: dict[str, _FusedLayer]) -> None:
    """Let the first of layers that follow each other directly, with the same angles, compute all of them."""
    runs: list[list[str]] = []
    last: _FusedLayer | None = None
    for name, each in fused.items():
        follows = (
            last is not None and each.input is last.output and each.position_embeddings is last.position_embeddings
        )
        if follows:
            runs[-1].append(name)
        else:
            runs.append([name])
        last = each
    for first, *others in runs:
        if others:
            model.set_submodule(first, FusedLayers([fused[name].layer for name in (first, *others)]))
        for name in others:
            model.set_submodule(name, JoinedLayer())


def _shorten(model: PreTrainedModel, trial: _Trial, expected: Tensor) -> None:
    """Spare steps what the model does between its fused parts, wherever it gives the same without, bit for bit."""

    def is_same() -> bool:
        try:
            return torch.equal(trial.watch()[2], expected)
        except Exception:  # whatever the model's own code counts on
            return False

    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        kept = list(layers)
        while len(layers) > 1 and isinstance(layers[-1], JoinedLayer):
            del layers[-1]
        if len(layers) < len(kept) and not is_same():
            layers.extend(kept[len(layers) :])
    direct = find_direct_forward(model, lambda module: isinstance(module, FusedLayers), lambda: trial.watch()[2])
    if direct is None or not _call_instead(model, direct, is_same):
        return
    try:
        whole = _whole_pass(direct, trial)
    except Exception:
        return
    if whole is None:
        return
    model.add_module("fused_pass", whole)  # where `make_forward` finds it
    if not is_same():
        del model.fused_pass


def _call_instead(model: PreTrainedModel, forward: Callable[..., Any], is_same: Callable[[], bool]) -> bool:
    """Let calls of this model (not of its class) be calls of `forward`, if that gives the same."""
    own = vars(model)
    before = {name: own[name] for name in ("forward",) if name in own}
    own["forward"] = forward
    if is_same():
        return True
    del own["forward"]
    own.update(before)
    return False


def _whole_pass(direct: DirectForward, trial: _Trial) -> FusedPass | None:
    """A chain as one call; None if a part of it is not one of ours, or its angles are too many."""
    layers, norm, output = direct.layers, direct.norm, direct.output
    if not (isinstance(layers, FusedLayers) and isinstance(norm, FusedNorm) and isinstance(output, FusedLinear)):
        return None
    angles = None if direct.rotary is None else tabulate(direct.rotary, trial.max_model_len, trial.dtype)
    if direct.rotary is not None and angles is None:
        return None
    embedding = direct.embedding
    table = _table(embedding, trial.dtype)
    return FusedPass(
        layers.decoder.layers,
        Ends(table, norm.norm, output.packed),
        embedding=embedding if table is None else None,
        angles=angles,
    )


def _table(embedding: nn.Module, dtype: torch.dtype) -> PackedLinear | Tensor | None:
    """What the kernels can look ids up in."""
    if isinstance(embedding, SharedEmbedding):
        return embedding.packed
    if type(embedding) is nn.Embedding and embedding.weight.dtype == dtype and embedding.weight.is_contiguous():
        return embedding.weight.detach()
    return None


def _fuse_rest(model: PreTrainedModel, called: Collection[str], *, int8: bool) -> None:
    """Linear layers (those that were `called`), norms and a tied embedding that are still torch's."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = type(embedding) is nn.Embedding and output is not None and output.weight is embedding.weight
    for name, module in list(model.named_modules()):
        fused: nn.Module | None = None
        if type(module) is nn.Linear and name in called and can_pack(module.weight):
            packed = pack_module(module, int8=int8)
            fused = _proved(name, module, FusedLinear(packed, float_output=module is output), module.in_features, int8)
            if module is output and is_tied and fused is not None and not int8:
                _replace(model, embedding, SharedEmbedding(packed))
        elif "RMSNorm" in type(module).__name__:
            try:
                norm = read_norm(module)
            except Unfusable:
                continue
            fused = _proved(name, module, FusedNorm(norm), norm.weight.numel(), False)
        if fused is not None:
            model.set_submodule(name, fused)


def _replace(model: PreTrainedModel, old: nn.Module, new: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if module is old:
            model.set_submodule(name, new)


@torch.inference_mode()
def _proved(name: str, original: nn.Module, fused: nn.Module, size: int, int8: bool) -> nn.Module | None:
    """The fused module if it does to random numbers what the original does."""
    dtype = next(original.parameters()).dtype
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    compare: Callable[[Tensor, Tensor, torch.dtype], bool] = is_close
    if compare(fused(x).float(), original(x).float(), torch.bfloat16 if int8 else dtype):
        return fused
    logger.warning("%s stays as it is: fused, it computes something else", name)
    return None
