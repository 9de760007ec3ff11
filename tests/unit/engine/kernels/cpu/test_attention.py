import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import AttentionOptions, IntArray, PackedRows
from engine.kernels.cpu.attention import empty_cache, paged_attention, plan_attention, write_kv
from engine.kernels.quantized import dequantize, quantize

Types = tuple[torch.dtype, torch.dtype]
"""Of queries, keys and values; and of the cache."""
Heads = tuple[int, int, int, int, int]
Option = tuple[int | None, float | None, bool]

ROWS = [(1, 1), (31, 31), (32, 1), (33, 2), (129, 70), (513, 1), (1500, 1), (1030, 40)]
"""Context and query tokens: around blocks, spans and ranges; decoding, prompts, and rows whose ranges are split."""
HEADS = [
    (9, 3, 64, 64, 32),
    (4, 4, 16, 16, 16),
    (8, 2, 128, 128, 32),
    (6, 3, 8, 8, 48),
    (40, 1, 24, 40, 64),
    (4, 2, 5, 7, 16),
]
"""Query heads, key heads, key and value dims, block size."""
OPTIONS = [(None, None, False), (33, None, False), (None, 5.0, True), (700, None, True), (1, 2.0, False)]
"""Window, soft-cap, sinks."""
ALL = list(itertools.product(OPTIONS, HEADS))
SOME = list(zip(itertools.cycle(OPTIONS), HEADS, strict=False))
"""Each of both at least once."""


@dataclass
class Step:
    """Rows in a cache full of NaN, their blocks scattered over it."""

    query: Tensor
    keys: list[Tensor]
    """As they are stored; so are the values."""
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    rows: PackedRows


def make_step(
    rows: list[tuple[int, int]],
    heads: Heads,
    types: Types,
    variant: str,
) -> Step:
    dtype, cache_dtype = types
    num_heads, num_kv_heads, key_dim, value_dim, block_size = heads
    contexts = np.array([context for context, _ in rows])
    num_blocks = -(-contexts // block_size)
    shuffled = np.random.default_rng(0).permutation(num_blocks.sum() + 2)
    tables = np.full((len(rows), num_blocks.max()), -1, dtype=np.int64)  # what lies behind a row's blocks is not read
    for row, mine in enumerate(np.split(shuffled[:-2], np.cumsum(num_blocks)[:-1])):
        tables[row, : len(mine)] = mine
    k_cache, v_cache = empty_cache(len(shuffled), block_size, num_kv_heads, (key_dim, value_dim), *types)
    poison(k_cache)
    poison(v_cache)
    keys = [torch.randn(context, num_kv_heads, key_dim).to(dtype) for context in contexts]
    values = [torch.randn(context, num_kv_heads, value_dim).to(dtype) for context in contexts]
    slots = np.concatenate([slots_of(tables[row], context, block_size) for row, context in enumerate(contexts)])
    write_kv(torch.cat(keys), torch.cat(values), k_cache, v_cache, torch.from_numpy(slots), variant=variant)
    starts = np.cumsum([0, *(queries for _, queries in rows)])
    query = torch.randn(int(starts[-1]), num_heads, key_dim).to(dtype)
    keys, values = ([as_stored(each, cache_dtype) for each in both] for both in (keys, values))
    return Step(query, keys, values, k_cache, v_cache, PackedRows(starts, contexts, tables, block_size))


def poison(cache: Tensor) -> None:
    """NaN all over, between the heads too; of int8s the scales are NaN."""
    whole = torch.empty(0, dtype=torch.int8).set_(cache.untyped_storage())
    whole.fill_(-1)


def as_stored(x: Tensor, cache_dtype: torch.dtype) -> Tensor:
    if cache_dtype == torch.int8:
        return dequantize(*quantize(x), torch.float32)
    return x.to(cache_dtype)


def slots_of(table: IntArray, context: int, block_size: int) -> IntArray:
    positions = np.arange(context)
    slots: IntArray = table[positions // block_size] * block_size + positions % block_size
    return slots


def attend(step: Step, options: AttentionOptions, variant: str) -> Tensor:
    plan = plan_attention(step.rows)
    return paged_attention(step.query, step.k_cache, step.v_cache, plan, options, variant=variant)


def expected(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """One row, in float64: query [n, H, key_dim] against keys [L, G, key_dim] and values [L, G, value_dim]."""
    n, num_heads, _ = query.shape
    context, group = keys.shape[0], num_heads // keys.shape[1]
    k, v = (tensor.double().repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", query.double(), k) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    distance = torch.arange(context - n, context)[:, None] - torch.arange(context)
    seen = (distance >= 0) & (distance < (options.window or context))
    scores = scores.masked_fill(~seen, -torch.inf)
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks.double()[:, None, None].expand(-1, n, 1)], dim=-1)
    return torch.einsum("hnl,lhd->nhd", torch.softmax(scores, dim=-1)[..., :context], v)


@pytest.mark.parametrize(("option", "heads"), ALL, ids=str)
def test_attention(
    variant: str,
    dtype: torch.dtype,
    heads: Heads,
    option: Option,
) -> None:
    check_attention(variant, (dtype, dtype), heads, option)


@pytest.mark.parametrize(
    ("option", "heads"),
    [case if case in SOME else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
    ids=str,
)
def test_attention_to_a_narrower_cache(
    variant: str,
    narrow_types: Types,
    heads: Heads,
    option: Option,
) -> None:
    check_attention(variant, narrow_types, heads, option)


def check_attention(
    variant: str,
    types: Types,
    heads: Heads,
    option: Option,
) -> None:
    """Against attention to what is stored, in float64."""
    window, softcap, has_sinks = option
    options = AttentionOptions(heads[2] ** -0.5, window, softcap, torch.randn(heads[0]) if has_sinks else None)
    step = make_step(ROWS, heads, types, variant)
    out = attend(step, options, variant)
    for i, (first, last) in enumerate(itertools.pairwise(step.rows.query_starts)):
        wanted = expected(step.query[first:last], step.keys[i], step.values[i], options)
        difference = (out[first:last].double() - wanted).abs().max()
        assert difference < (2e-2 if types[0] == torch.bfloat16 else 2e-5), f"row {i}"


@pytest.mark.parametrize("option", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_token_does_not_depend_on_its_neighbours(
    variant: str,
    types: Types,
    option: Option,
    num_threads: int,
) -> None:
    """Bit for bit: alone or in a batch, in a prompt of any chunks or as the newest token, with any threads."""
    heads = (6, 2, 64, 64, 32)
    window, softcap, has_sinks = option
    options = AttentionOptions(0.125, window, softcap, torch.randn(6) if has_sinks else None)
    step = make_step(ROWS, heads, types, variant)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    together = attend(step, options, variant)
    torch.set_num_threads(before)
    for i, (first, last) in enumerate(itertools.pairwise(step.rows.query_starts)):
        for chunk in (1, 7, 64):
            for start in {*range(first, last, chunk)[-3:], first}:
                stop = min(start + chunk, last)
                rows = PackedRows(
                    np.array([0, stop - start]),
                    step.rows.context_lens[i : i + 1] - (last - stop),
                    step.rows.block_tables[i : i + 1],
                    step.rows.block_size,
                )
                alone = Step(step.query[start:stop], [], [], step.k_cache, step.v_cache, rows)
                assert torch.equal(attend(alone, options, variant), together[start:stop])


def test_strided_queries(variant: str, types: Types) -> None:
    """Queries as they lie in the output of one projection for queries, keys and values."""
    step = make_step([(40, 3)], (4, 2, 16, 16, 16), types, variant)
    wide = torch.full((3, 7, 16), torch.nan, dtype=types[0])
    wide[:, 1:5] = step.query
    options = AttentionOptions(0.25)
    dense = attend(step, options, variant)
    step.query = wide[:, 1:5]
    assert torch.equal(attend(step, options, variant), dense)
    step.query = wide.transpose(0, 1).contiguous().transpose(0, 1)[:, 1:5]  # heads outside, as transformers has them
    assert torch.equal(attend(step, options, variant), dense)


def test_layout_of_the_cache(variant: str) -> None:
    """Pairs of dims for keys and pairs of tokens for values, as `kernels.h` draws them."""
    k_cache, v_cache = empty_cache(2, 16, 1, (4, 16), torch.bfloat16, torch.bfloat16)
    key, value = torch.arange(4.0).bfloat16().view(1, 1, 4), torch.arange(16.0).bfloat16().view(1, 1, 16)
    write_kv(key, value, k_cache, v_cache, torch.tensor([16 + 5]), variant=variant)
    assert k_cache.shape == (2, 1, 2, 16, 2)
    assert k_cache[1, 0, :, 5, :].flatten().tolist() == [0, 1, 2, 3]
    assert torch.equal(v_cache[1, 0, 2, :, 1], value.flatten())


def test_layout_of_int8s(variant: str, dtype: torch.dtype) -> None:
    """A token's numbers beside those of other tokens, the scales behind a head of a block."""
    k_cache, v_cache = empty_cache(2, 16, 3, (5, 7), dtype, torch.int8)
    key = torch.tensor([1.0, -2.0, 127.0, 0.0, 0.4]).expand(1, 3, 5) * torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1)
    value = torch.tensor([0.0, 63.5, -31.75, 0.25, 1.0, 2.0, 3.0]).expand(1, 3, 7)
    write_kv(key.to(dtype), value.to(dtype), k_cache, v_cache, torch.tensor([16 + 5]), variant=variant)
    assert k_cache.shape == (2, 3, 5, 16, 1)
    assert v_cache.shape == (2, 3, 16, 7, 1)
    for head in range(3):
        assert k_cache[1, head, :, 5, 0].tolist() == [1, -2, 127, 0, 0]
        assert v_cache[1, head, 5, :, 0].tolist() == [0, 127, -64, 0, 2, 4, 6]
    assert scales_of(k_cache, 5)[1, :, 5].tolist() == [1.0, 2.0, 4.0]
    assert scales_of(v_cache, 16)[1, :, 5].tolist() == [0.5, 0.5, 0.5]


def scales_of(cache: Tensor, num_dims: int) -> Tensor:
    """[num_blocks, G, block_size] for an int8 cache with heads of so many dims, padding included."""
    whole = torch.empty(0, dtype=torch.float32).set_(cache.untyped_storage())
    block_size = whole.numel() // (cache.shape[0] * cache.shape[1]) * 4 // (num_dims + 4)
    return whole.view(*cache.shape[:2], -1)[..., block_size * num_dims // 4 :]


@pytest.mark.parametrize("dim", [1, 5, 16, 64, 100, 512])
def test_int8s_are_those_of_the_definition(variant: str, dtype: torch.dtype, dim: int) -> None:
    """Bit for bit, numbers of any size; and of a head in which one is not finite nothing is usable."""
    sizes = torch.tensor([0.0, 1e-38, 1e-31, 1e-12, 1.0, 3e3, 1e30, 1.0, 1.0, 1.0]).view(10, 1, 1)
    key, value = (torch.randn(10, 2, dim) * sizes for _ in range(2))
    for row, bad in ((7, torch.nan), (8, torch.inf), (9, -torch.inf)):
        key[row, 1, dim // 2], value[row, 0, dim - 1] = bad, bad
    key, value = key.to(dtype), value.to(dtype)
    k_cache, v_cache = empty_cache(1, 16, 2, (dim, dim), dtype, torch.int8)
    write_kv(key, value, k_cache, v_cache, torch.arange(10), variant=variant)
    for x, found, scales in (
        (key, k_cache[0, :, :, :10, 0].permute(2, 0, 1), scales_of(k_cache, dim)),
        (value, v_cache[0, :, :10, :, 0].transpose(0, 1), scales_of(v_cache, -(-dim // 16) * 16)),
    ):
        small, scale = quantize(x)
        assert torch.equal(found, small)
        assert torch.equal(scales[0, :, :10].T.nan_to_num(), scale[..., 0].nan_to_num())
        assert torch.equal(scales[0, :, :10].T.isnan(), ~x.isfinite().all(-1))


def test_writing_touches_its_slots_only(variant: str, types: Types) -> None:
    dtype, cache_dtype = types
    k_cache, v_cache = empty_cache(3, 16, 2, (8, 16), *types)
    poison(k_cache)
    poison(v_cache)
    slots = torch.tensor([1, 17, 18, 40])
    write_kv(torch.ones(4, 2, 8, dtype=dtype), torch.ones(4, 2, 16, dtype=dtype), k_cache, v_cache, slots, variant)
    for cache, dim in ((k_cache, 8), (v_cache, 16)):
        whole = torch.empty(0, dtype=torch.int8).set_(cache.untyped_storage())
        bytes_per_head = dim * cache_dtype.itemsize + (4 if cache_dtype == torch.int8 else 0)
        written = whole.view(-1, cache_dtype.itemsize).ne(-1).any(-1) if cache_dtype != torch.int8 else whole.ne(-1)
        assert int(written.sum()) * cache_dtype.itemsize == 4 * 2 * bytes_per_head


def test_heads_that_are_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of 1024 dims"):
        empty_cache(1, 16, 1, (1024, 64), torch.float32, torch.float32)
