"""How large the KV cache gets, and the tensors that come of it."""

from __future__ import annotations

import pytest
import torch

from config.schema import CacheConfig
from engine.errors import ConfigError
from engine.kernels import choose, reference
from engine.kv.storage import KVCapacity, KVStorage, LayerSpec, bytes_per_token, plan_capacity
from tests.cpu_kernels import build_kernels

TOKEN_BYTES = 1000
MIB = 2**20


def capacity(config: CacheConfig, *, free: int = 10**9, default: int = 10**8, useful: int = 10**6) -> KVCapacity:
    return plan_capacity(config, token_bytes=TOKEN_BYTES, free_bytes=free, default_bytes=default, useful_tokens=useful)


def test_bytes_of_a_token() -> None:
    layers = [LayerSpec(num_kv_heads=3, key_dim=64, value_dim=64)] * 30
    assert bytes_per_token(layers, torch.bfloat16) == 30 * 3 * 128 * 2  # SmolLM2: 22.5 KiB
    assert bytes_per_token(layers, torch.int8) == 30 * 3 * (128 + 8)  # 12 KiB
    assert LayerSpec(2, key_dim=24, value_dim=16).bytes_per_token(torch.float32) == 2 * 40 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_what_is_counted_is_what_is_allocated(kernels: str, dtype: torch.dtype) -> None:
    """In all types that the cache may have, scales included."""
    if kernels == "cpu":
        build_kernels()
    back_end = choose(kernels, torch.device("cpu"), dtype, 32)
    layers = [LayerSpec(num_kv_heads=3, key_dim=64, value_dim=32)] * 2
    sizes = []
    for cache_dtype in back_end.cache_dtypes(dtype):
        storage = KVStorage.allocate(layers, KVCapacity(5, 32), cache_dtype, torch.device("cpu"), back_end.empty_cache)
        allocated = sum(tensor.untyped_storage().nbytes() for tensor in (*storage.keys, *storage.values))
        assert allocated == 5 * 32 * bytes_per_token(layers, cache_dtype)
        sizes.append(allocated)
    assert sizes[1] == sizes[0] * (96 + 8) / (96 * dtype.itemsize)  # int8


def test_by_default_a_share_in_whole_blocks() -> None:
    assert capacity(CacheConfig(block_size=32), default=99_999) == KVCapacity(3, 32)
    assert capacity(CacheConfig(block_size=32), default=99_999).num_tokens == 96


def test_by_default_no_more_than_is_of_use() -> None:
    assert capacity(CacheConfig(block_size=32), useful=65).num_blocks == 3


def test_what_is_asked_for_is_given_though_it_is_of_no_use() -> None:
    assert capacity(CacheConfig(block_size=16, kv_cache_tokens=1000), useful=10).num_blocks == 62
    assert capacity(CacheConfig(block_size=16, kv_cache_memory=MIB), useful=10).num_blocks == 65


@pytest.mark.parametrize(
    ("config", "setting", "message"),
    [
        (CacheConfig(kv_cache_tokens=31), "kv_cache_tokens", r"a block of 32 tokens takes 31\.2 KiB"),
        (CacheConfig(kv_cache_memory=31_999), "kv_cache_memory", r"a block of 32 tokens takes 31\.2 KiB"),
        (CacheConfig(kv_cache_tokens=10**6 + 32), "kv_cache_tokens", r"1000032 tokens takes 953\.7 MiB .* 953\.7 MiB"),
        (CacheConfig(kv_cache_memory=2 * 10**9), "kv_cache_memory", r"1\.9 GiB .* 953\.7 MiB of memory are free"),
        (CacheConfig(kv_cache_tokens=64, kv_cache_memory=MIB), "kv_cache_tokens", "twice"),
    ],
)
def test_refused_with_numbers(config: CacheConfig, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        capacity(config)
    assert caught.value.setting == setting
    assert caught.value.hint


def test_too_large_says_what_would_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        capacity(CacheConfig(block_size=32, kv_cache_tokens=10**7))
    assert caught.value.hint == "there is room for 1000000 tokens"


def test_too_little_memory_for_one_block() -> None:
    with pytest.raises(ConfigError, match="no block"):
        capacity(CacheConfig(block_size=32), free=31_000, default=7_750)


def test_tensors_of_each_layer() -> None:
    layers = [LayerSpec(2, key_dim=8, value_dim=6), LayerSpec(1, key_dim=16, value_dim=16)]
    storage = KVStorage.allocate(layers, KVCapacity(5, 4), torch.bfloat16, torch.device("cpu"), reference.empty_cache)
    assert [tuple(k.shape) for k in storage.keys] == [(5, 4, 2, 8), (5, 4, 1, 16)]
    assert [tuple(v.shape) for v in storage.values] == [(5, 4, 2, 6), (5, 4, 1, 16)]
    assert {t.dtype for t in storage.keys + storage.values} == {torch.bfloat16}
    assert storage.block_size == 4
