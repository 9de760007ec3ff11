import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import AttentionOptions, IntArray, PackedRows
from engine.kernels.cpu.attention import empty_cache, paged_attention, plan_attention, write_kv

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


@dataclass
class Step:
    """Rows in a cache full of NaN, their blocks scattered over it."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    rows: PackedRows


def make_step(
    rows: list[tuple[int, int]], heads: tuple[int, int, int, int, int], dtype: torch.dtype, variant: str
) -> Step:
    num_heads, num_kv_heads, key_dim, value_dim, block_size = heads
    contexts = np.array([context for context, _ in rows])
    num_blocks = -(-contexts // block_size)
    shuffled = np.random.default_rng(0).permutation(num_blocks.sum() + 2)
    tables = np.full((len(rows), num_blocks.max()), -1, dtype=np.int64)  # what lies behind a row's blocks is not read
    for row, mine in enumerate(np.split(shuffled[:-2], np.cumsum(num_blocks)[:-1])):
        tables[row, : len(mine)] = mine
    k_cache, v_cache = empty_cache(len(shuffled), block_size, num_kv_heads, (key_dim, value_dim), dtype)
    k_cache.fill_(torch.nan)
    v_cache.fill_(torch.nan)
    keys = [torch.randn(context, num_kv_heads, key_dim).to(dtype) for context in contexts]
    values = [torch.randn(context, num_kv_heads, value_dim).to(dtype) for context in contexts]
    slots = np.concatenate([slots_of(tables[row], context, block_size) for row, context in enumerate(contexts)])
    write_kv(torch.cat(keys), torch.cat(values), k_cache, v_cache, torch.from_numpy(slots), variant=variant)
    starts = np.cumsum([0, *(queries for _, queries in rows)])
    query = torch.randn(int(starts[-1]), num_heads, key_dim).to(dtype)
    return Step(query, keys, values, k_cache, v_cache, PackedRows(starts, contexts, tables, block_size))


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


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention(
    variant: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int, int, int],
    option: tuple[int | None, float | None, bool],
) -> None:
    window, softcap, has_sinks = option
    options = AttentionOptions(heads[2] ** -0.5, window, softcap, torch.randn(heads[0]) if has_sinks else None)
    step = make_step(ROWS, heads, dtype, variant)
    out = attend(step, options, variant)
    for i, (first, last) in enumerate(itertools.pairwise(step.rows.query_starts)):
        wanted = expected(step.query[first:last], step.keys[i], step.values[i], options)
        difference = (out[first:last].double() - wanted).abs().max()
        assert difference < (2e-2 if dtype == torch.bfloat16 else 2e-5), f"row {i}"


@pytest.mark.parametrize("option", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_token_does_not_depend_on_its_neighbours(
    variant: str, dtype: torch.dtype, option: tuple[int | None, float | None, bool], num_threads: int
) -> None:
    """Bit for bit: alone or in a batch, in a prompt of any chunks or as the newest token, with any threads."""
    heads = (6, 2, 64, 64, 32)
    window, softcap, has_sinks = option
    options = AttentionOptions(0.125, window, softcap, torch.randn(6) if has_sinks else None)
    step = make_step(ROWS, heads, dtype, variant)
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


def test_strided_queries(variant: str, dtype: torch.dtype) -> None:
    """Queries as they lie in the output of one projection for queries, keys and values."""
    step = make_step([(40, 3)], (4, 2, 16, 16, 16), dtype, variant)
    wide = torch.full((3, 7, 16), torch.nan, dtype=dtype)
    wide[:, 1:5] = step.query
    options = AttentionOptions(0.25)
    dense = attend(step, options, variant)
    step.query = wide[:, 1:5]
    assert torch.equal(attend(step, options, variant), dense)
    step.query = wide.transpose(0, 1).contiguous().transpose(0, 1)[:, 1:5]  # heads outside, as transformers has them
    assert torch.equal(attend(step, options, variant), dense)


def test_layout_of_the_cache(variant: str) -> None:
    """Pairs of dims for keys and pairs of tokens for values, as `kernels.h` draws them."""
    k_cache, v_cache = empty_cache(2, 16, 1, (4, 16), torch.bfloat16)
    key, value = torch.arange(4.0).bfloat16().view(1, 1, 4), torch.arange(16.0).bfloat16().view(1, 1, 16)
    write_kv(key, value, k_cache, v_cache, torch.tensor([16 + 5]), variant=variant)
    assert k_cache.shape == (2, 1, 2, 16, 2)
    assert k_cache[1, 0, :, 5, :].flatten().tolist() == [0, 1, 2, 3]
    assert torch.equal(v_cache[1, 0, 2, :, 1], value.flatten())


def test_writing_touches_its_slots_only(variant: str, dtype: torch.dtype) -> None:
    k_cache, v_cache = empty_cache(3, 16, 2, (8, 16), dtype)
    k_cache.fill_(torch.nan)
    v_cache.fill_(torch.nan)
    slots = torch.tensor([1, 17, 18, 40])
    write_kv(torch.ones(4, 2, 8, dtype=dtype), torch.ones(4, 2, 16, dtype=dtype), k_cache, v_cache, slots, variant)
    assert int((~k_cache.isnan()).sum()) == 4 * 2 * 8
    assert int((~v_cache.isnan()).sum()) == 4 * 2 * 16


def test_heads_that_are_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of 1024 dims"):
        empty_cache(1, 16, 1, (1024, 64), torch.float32)
