"""The KV cache's tensors, and how many blocks they have.

`KVCapacity` is worked out once, before anything is allocated; `KVStorage` then holds one key and one value tensor for
each layer. Which block belongs to whom is not known here (see `blocks` and `manager`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema import CacheConfig
from engine.errors import ConfigError
from engine.kernels.quantized import SCALE_BYTES
from engine.machine import format_bytes

EmptyCache = Callable[[int, int, int, tuple[int, int], torch.dtype, torch.device], tuple[Tensor, Tensor]]
"""(num_blocks, block_size, num_kv_heads, (key_dim, value_dim), dtype, device) -> a layer's key and value tensor."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps of each token: a key and a value for each of its key heads."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values; int8s have a scale for each head of both."""
        scales = 2 * SCALE_BYTES if dtype == torch.int8 else 0
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scales)


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """How much the KV cache holds."""

    num_blocks: int
    block_size: int
    """Tokens in one block."""

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_blocks * self.block_size


def bytes_per_token(layers: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    return sum(layer.bytes_per_token(dtype) for layer in layers)


def plan_capacity(
    config: CacheConfig, *, token_bytes: int, free_bytes: int, default_bytes: int, useful_tokens: int
) -> KVCapacity:
    """How many blocks the KV cache gets.

    `token_bytes`: see `bytes_per_token`. `free_bytes`: memory that could be taken, at the very most. `default_bytes`:
    what to take when no size is asked for. `useful_tokens`: more than this is not taken unless asked for, since all
    requests together can hold no more.
    Raises ConfigError when what is asked for is not there, or when not even one block fits.
    """
    size = config.block_size
    block_bytes = token_bytes * size
    if config.kv_cache_tokens is not None and config.kv_cache_memory is not None:
        raise ConfigError(
            "the KV cache's size is given twice, in tokens and in bytes",
            setting="kv_cache_tokens",
            hint="leave out one of kv_cache_tokens and kv_cache_memory",
        )
    if config.kv_cache_tokens is not None:
        setting, num_blocks = "kv_cache_tokens", config.kv_cache_tokens // size
    elif config.kv_cache_memory is not None:
        setting, num_blocks = "kv_cache_memory", config.kv_cache_memory // block_bytes
    else:
        setting, num_blocks = "kv_cache_memory", min(default_bytes // block_bytes, -(-useful_tokens // size))
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache would hold no block: a block of {size} tokens takes {format_bytes(block_bytes)} with this "
            f"model, and {format_bytes(free_bytes)} of memory are free",
            setting=setting,
            hint=f"ask for at least {size} tokens, or make block_size smaller",
        )
    if num_blocks * block_bytes > free_bytes:
        raise ConfigError(
            f"a KV cache of {num_blocks * size} tokens takes {format_bytes(num_blocks * block_bytes)} with this model; "
            f"{format_bytes(free_bytes)} of memory are free",
            setting=setting,
            hint=f"there is room for {free_bytes // block_bytes * size} tokens",
        )
    return KVCapacity(num_blocks, size)


@dataclass(frozen=True, slots=True)
class KVStorage:
    """One key and one value tensor for each layer, by layer index."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    block_size: int

    @property
    def caches(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values."""
        return self.keys, self.values

    @classmethod
    def allocate(
        cls,
        layers: Sequence[LayerSpec],
        capacity: KVCapacity,
        dtype: torch.dtype,
        device: torch.device,
        empty_cache: EmptyCache,
    ) -> KVStorage:
        """Tensors with anything in them: a slot is always written before it is read.

        `empty_cache` is the kernels': how keys and values lie in a layer's tensors is their business.
        """
        caches = [
            empty_cache(
                capacity.num_blocks,
                capacity.block_size,
                layer.num_kv_heads,
                (layer.key_dim, layer.value_dim),
                dtype,
                device,
            )
            for layer in layers
        ]
        keys, values = zip(*caches, strict=True)
        return cls(keys=keys, values=values, block_size=capacity.block_size)
