"""The reference kernels against attention written out for one query at a time, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels import AttentionOptions, PackedRows, choose, reference
from engine.kernels.quantized import dequantize, quantize

CPU = torch.device("cpu")
ROWS = [(1, 1), (3, 3), (4, 1), (5, 2), (8, 8), (9, 1), (30, 1), (31, 1), (23, 11), (40, 40)]
"""Context and query tokens of each row: around block borders; decoding, whole prompts and chunks of them."""
HEADS = [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 5, 7)]
"""Query heads, key heads, key dim, value dim."""
BLOCK_SIZE = 4


@dataclass
class Step:
    """Rows whose blocks are scattered over a cache that holds NaN wherever no row has written."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    rows: PackedRows

    def attend(self, options: AttentionOptions, windows: tuple[int | None, ...] = ()) -> Tensor:
        plan = reference.plan_attention(self.rows, {options.window, *windows}, CPU)
        return reference.paged_attention(self.query, self.k_cache, self.v_cache, plan, options)


def make_step(
    heads: tuple[int, int, int, int],
    rows: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Step:
    num_heads, num_kv_heads, key_dim, value_dim = heads
    numbers = np.random.default_rng(0)
    torch.manual_seed(0)
    contexts = np.array([context for context, _ in rows])
    num_blocks = -(-contexts // BLOCK_SIZE)
    ids = numbers.permutation(num_blocks.sum() + 3)
    tables = np.full((len(rows), num_blocks.max()), 10**6)  # what lies behind a row's blocks must not be read
    kind = cache_dtype or dtype
    k_cache, v_cache = reference.empty_cache(len(ids), BLOCK_SIZE, num_kv_heads, (key_dim, value_dim), kind, CPU)
    for cache in (k_cache, v_cache):
        cache.view(torch.uint8).fill_(255)  # NaN, or int8s with NaN for their scales
    keys, values = [], []
    for row, context in enumerate(contexts):
        blocks, ids = ids[: num_blocks[row]], ids[num_blocks[row] :]
        tables[row, : len(blocks)] = blocks
        keys.append(torch.randn(context, num_kv_heads, key_dim).to(dtype))
        values.append(torch.randn(context, num_kv_heads, value_dim).to(dtype))
        slots = [int(blocks[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(context)]
        reference.write_kv(keys[-1], values[-1], k_cache, v_cache, torch.tensor(slots))
    starts = np.cumsum([0, *(queries for _, queries in rows)])
    query = torch.randn(int(starts[-1]), num_heads, key_dim).to(dtype)
    if kind == torch.int8:
        keys, values = ([dequantize(*quantize(each), dtype) for each in both] for both in (keys, values))
    return Step(query, keys, values, k_cache, v_cache, PackedRows(starts, contexts, tables, BLOCK_SIZE))


def attend_naively(step: Step, options: AttentionOptions) -> Tensor:
    """Each query by itself: scores, soft-cap, sink, softmax, sum."""
    outputs = []
    for row, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
        first, last = step.rows.query_starts[row : row + 2]
        for token in range(first, last):
            position = len(keys) - (last - token)
            oldest = 0 if options.window is None else max(0, position + 1 - options.window)
            for head in range(step.query.shape[1]):
                group = head * keys.shape[1] // step.query.shape[1]
                scores = keys[oldest : position + 1, group].double() @ step.query[token, head].double() * options.scale
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                weights = scores.exp()
                total = weights.sum() + (0 if options.sinks is None else options.sinks[head].double().exp())
                outputs.append((weights / total) @ values[oldest : position + 1, group].double())
    return torch.stack(outputs).view(step.query.shape[0], step.query.shape[1], -1)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 4, 6, 1000])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention(
    heads: tuple[int, int, int, int], window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    step = make_step(heads, ROWS)
    sinks = torch.linspace(-2, 2, heads[0]) if with_sinks else None
    options = AttentionOptions(scale=0.3, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(step.attend(options).double(), attend_naively(step, options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_narrower_caches(heads: tuple[int, int, int, int], cache_dtype: torch.dtype, softcap: float | None) -> None:
    """Attention to what was stored: int8 times its scale, or bfloat16."""
    step = make_step(heads, ROWS, cache_dtype=cache_dtype)
    if cache_dtype == torch.bfloat16:
        step.keys, step.values = ([each.bfloat16() for each in both] for both in (step.keys, step.values))
    options = AttentionOptions(scale=0.3, window=6, softcap=softcap)
    torch.testing.assert_close(step.attend(options).double(), attend_naively(step, options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_int8s_are_near(dtype: torch.dtype) -> None:
    """Half a step off at most, where a step is 1/127 of the largest number of the same head and token."""
    x = torch.randn(50, 3, 20).to(dtype) * torch.logspace(-2, 2, 50, dtype=dtype).view(50, 1, 1)
    small, scale = quantize(x)
    assert int(small.abs().amax(-1).min()) == int(small.abs().max()) == 127
    largest = x.double().abs().amax(-1, keepdim=True)
    assert ((small.double() * scale - x.double()).abs() <= largest / 127 * 0.5001).all()
    again = torch.cat([quantize(each)[0] for each in x.split(1)])
    assert torch.equal(again, small), "a token depends on its neighbours"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = torch.zeros(3, 2, 4)
    x[1, 0, 2] = bad
    found = dequantize(*quantize(x), torch.float32)
    assert found[1, 0].isnan().all()
    assert int(found.isnan().sum()) == 4
    assert int(found.count_nonzero()) == 4


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_bfloat16_sums_in_float32(softcap: float | None) -> None:
    step = make_step((4, 2, 16, 16), [(300, 1), (200, 20)], torch.bfloat16)
    options = AttentionOptions(scale=0.25, softcap=softcap)
    error = (step.attend(options).double() - attend_naively(step, options)).abs().max()
    assert error < 0.02  # a sum of 300 in bfloat16 would be off by about 0.5


@pytest.mark.parametrize("window", [None, 6])
def test_tiles_of_any_size_give_the_same(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(HEADS[1], ROWS)
    options = AttentionOptions(scale=0.3, window=window)
    whole = step.attend(options)
    monkeypatch.setattr(reference, "MAX_TILE_KEYS", 20)
    monkeypatch.setattr(reference, "MAX_TILE_QUERIES", 7)
    plan = reference.plan_attention(step.rows, {window}, CPU)[window]
    assert max(tile.num_queries for tile in plan) <= 7
    assert max(tile.num_rows for tile in plan) > 1
    assert all(tile.num_rows == 1 or len(tile.slots) <= 20 for tile in plan)
    assert sorted(torch.cat([tile.tokens for tile in plan]).tolist()) == list(range(len(step.query)))
    torch.testing.assert_close(step.attend(options), whole, rtol=1e-6, atol=1e-6)


def test_a_row_never_reads_its_neighbours_slots() -> None:
    """Rows of one tile are padded to the longest: with keys of their own, so that a neighbour's NaN stays there."""
    step = make_step(HEADS[0], [(5, 1), (30, 1), (7, 1)])
    clean = step.attend(AttentionOptions(scale=0.3))
    blocks = step.rows.block_tables[1, :8]
    step.k_cache[blocks] = torch.nan
    step.v_cache[blocks] = torch.nan
    for options in (AttentionOptions(scale=0.3), AttentionOptions(scale=0.3, softcap=1e6)):
        poisoned = step.attend(options)
        assert torch.isnan(poisoned[1]).all()
        torch.testing.assert_close(poisoned[[0, 2]], clean[[0, 2]])


def test_each_window_has_its_own_tiles() -> None:
    step = make_step(HEADS[0], ROWS)
    for window in (None, 3):
        options = AttentionOptions(scale=1 / math.sqrt(8), window=window)
        got = step.attend(options, windows=(None, 3, 50))
        torch.testing.assert_close(got.double(), attend_naively(step, options), rtol=1e-5, atol=1e-5)


def test_write_kv_touches_the_given_slots_only() -> None:
    k_cache, v_cache = reference.empty_cache(3, 4, 2, (5, 3), torch.float32, CPU)
    k_cache.zero_()
    v_cache.zero_()
    key, value = torch.randn(3, 2, 5), torch.randn(3, 2, 3)
    reference.write_kv(key, value, k_cache, v_cache, torch.tensor([7, 0, 9]))
    assert torch.equal(k_cache[1, 3], key[0])
    assert torch.equal(v_cache[0, 0], value[1])
    assert torch.equal(v_cache[2, 1], value[2])
    assert int(k_cache.any(-1).sum()) == 3 * 2


def test_choose_by_name() -> None:
    assert choose("reference", CPU, torch.float32, 4).NAME == "reference"
    with pytest.raises(ConfigError, match="cuda:0"):
        choose("cpu", torch.device("cuda:0"), torch.float32, 32)
