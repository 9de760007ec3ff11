"""Kernels: what the engine computes beside the model's own modules, behind one small contract.

`choose` picks a back end by name and device, and imports it only then. A back end is a module; `Kernels` below says
what it holds. `reference` (torch only) is always there and is the definition of right.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where a step's rows lie in the packed query, and in the KV cache. Host arrays: their sizes cost no wait."""

    query_starts: IntArray
    """[rows + 1]: row `i` has the packed tokens `query_starts[i] ... query_starts[i + 1] - 1`; at least one."""
    context_lens: IntArray
    """[rows]: the keys a row's last token sees, its own included. A row's tokens are the last ones of its context."""
    block_tables: IntArray
    """[rows, most blocks]: the blocks of a row's context, in order; what lies behind them is never read."""
    block_size: int
    """Tokens in one block. The slot of a position is `block_table[position // block_size] * block_size + the rest`."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """All numbers that a forward pass needs of a step. T tokens in R rows, L logits wanted, at most B blocks a row.

    They lie in one piece, one array behind the other, so that C needs one address: in a step that has just read all
    weights, whatever Python touches is no longer in a cache. Arrays for others are views, made when asked for.
    """

    numbers: array[int]
    """int64: token_ids, position_ids, slots, query_starts, context_lens, block_tables, logits_rows."""
    num_tokens: int
    num_rows: int
    num_blocks: int
    num_logits: int
    block_size: int

    @property
    def places(self) -> tuple[int, ...]:
        """Where in `numbers` each array begins, in their order."""
        tokens, rows = self.num_tokens, self.num_rows
        starts = 3 * tokens
        contexts = starts + rows + 1
        tables = contexts + rows
        return 0, tokens, 2 * tokens, starts, contexts, tables, tables + rows * self.num_blocks

    @property
    def token_ids(self) -> IntArray:
        """[T]"""
        return self._view(0, self.num_tokens)

    @property
    def position_ids(self) -> IntArray:
        """[T]: the place of each token in its own sequence."""
        return self._view(1, self.num_tokens)

    @property
    def slots(self) -> IntArray:
        """[T]: where in the KV cache each token's key and value go."""
        return self._view(2, self.num_tokens)

    @property
    def rows(self) -> PackedRows:
        """Where the rows lie."""
        rows = self.num_rows
        tables = self._view(5, rows * self.num_blocks).reshape(rows, self.num_blocks)
        return PackedRows(self._view(3, rows + 1), self._view(4, rows), tables, self.block_size)

    @property
    def logits_rows(self) -> IntArray:
        """[L]: the packed tokens whose logits are wanted."""
        return self._view(6, self.num_logits)

    def _view(self, part: int, size: int) -> IntArray:
        first = self.places[part]
        return np.frombuffer(self.numbers, dtype=np.int64)[first : first + size]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends. The order: scale, soft-cap, mask (causality and window), sinks, softmax."""

    scale: float
    """Factor on query . key."""
    window: int | None = None
    """A token sees this many last tokens, itself included; None: all before it."""
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)`."""
    sinks: Tensor | None = None
    """[num_heads]: a score for each head that takes its share of the softmax and adds nothing to the output."""


@dataclass(frozen=True, slots=True)
class Choices:
    """How to choose a token for each of n rows of logits."""

    rows: array[int]
    """int64 [n]: which rows of the logits."""
    settings: array[float]
    """float64 [4, n]:

    temperature    0: the largest logit, whatever else is said
    top_k          from 1 to the size of the vocabulary, which keeps all
    top_p          above 0, at most 1; 1 keeps all
    min_p          from 0 to 1; 0 keeps all
    """
    seeds: array[int]
    """uint64 [n]"""
    positions: array[int]
    """int64 [n]: of the tokens to choose. With the seed: the number that decides (`engine.sample.random`)."""


ChooseTokens = Callable[["Tensor", Choices], "Tensor"]
"""Logits (float32 [rows, vocabulary], left as they are) and n choices -> token ids, int64 [n], -1 where the logits were
not usable: steps 5 to 10 of `engine.sample.sampler`, and the same tokens but for rounding."""


class Kernels(Protocol):
    """The contract of a back end. T: tokens in the step; H query heads, G key heads (H a multiple of G).

    Tensors have the model's dtype and lie on its device, unless it says otherwise; caches are what `empty_cache` made,
    and how keys and values lie in them is the back end's own business. Nothing here waits for the device.
    """

    NAME: str

    @property
    def choose_tokens(self) -> ChooseTokens | None:
        """A way of its own to choose tokens; None: `engine.sample.ops` does it."""

    def plan_attention(self, rows: PackedRows, windows: Collection[int | None], device: torch.device) -> Any:
        """What `paged_attention` needs to know about a step, prepared once for all layers.

        `windows` are those of the model's layers. What comes back is the back end's own.
        """

    def cache_dtypes(self, dtype: torch.dtype) -> Collection[torch.dtype]:
        """What the caches of a model in `dtype` can hold: that, and what takes less memory."""

    def empty_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """k_cache and v_cache of one layer, with anything in them. `dims`: key_dim and value_dim.

        `dtype` is one of `cache_dtypes`. In int8 a head of a token has a scale of its own (`quantized`).
        """

    def write_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Store key [T, G, key_dim] and value [T, G, value_dim] at `slots` (int64 [T], no two alike).

        What is stored of a token depends on that token alone.
        """

    def paged_attention(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, options: AttentionOptions
    ) -> Tensor:
        """Causal attention of query [T, H, key_dim] to the caches; returns [T, H, value_dim].

        The step's own keys and values are in the caches already. Sums are in float32. A row's result depends on its
        neighbours by rounding at most, and never on slots that are not of its context: those may hold anything.
        """


def choose(name: str, device: torch.device, dtype: torch.dtype, block_size: int) -> Kernels:
    """The back end `name` says; `auto`: the fastest that runs here. Raises ConfigError when `name` cannot be had."""
    from engine.kernels import reference

    if name == "cpu" and device.type != "cpu":
        raise ConfigError(f"kernels is cpu, but the model is on {device}", setting="kernels", hint="use auto")
    if name != reference.NAME and device.type == "cpu":
        from engine.kernels.cpu.back_end import CpuKernels
        from engine.kernels.cpu.library import KernelsMissing

        try:
            return CpuKernels(dtype, block_size)
        except KernelsMissing as reason:
            if name == "cpu":
                raise ConfigError(str(reason), setting="kernels", hint="use --kernels reference") from reason
            logger.warning("using the reference kernels, which take several times as long: %s", reason)
    return cast(Kernels, reference)


def has_cpu_kernels(name: str, device: torch.device) -> bool:
    """Whether `choose` will find the C kernels."""
    from engine.kernels import reference
    from engine.kernels.cpu.library import KernelsMissing, variants

    if name == reference.NAME or device.type != "cpu":
        return False
    try:
        return bool(variants())
    except KernelsMissing:
        return False


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A host array on `device`, without waiting for what the device still computes.

    On the CPU the tensor shares the array's memory: do not write to either.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
