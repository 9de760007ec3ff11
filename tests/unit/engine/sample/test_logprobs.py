from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.plan import TokenLogprobs
from engine.sample import ops
from engine.sample.logprobs import LEAST, score

WIDE = ops.BLOCK * 30 + 7


def make_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def expected(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """One row, in Python floats."""
    values = logits.double().tolist()
    peak = max(values)
    log_sum = peak + math.log(sum(math.exp(value - peak) for value in values))
    logprobs = [max(value - log_sum, LEAST) for value in values]
    order = sorted(range(len(values)), key=lambda i: (-logprobs[i], i))
    rank = 1 + sum(value > values[token_id] for value in values)
    return TokenLogprobs(token_id, logprobs[token_id], rank, tuple((i, logprobs[i]) for i in order[:num_top]))


def check(got: TokenLogprobs | None, wanted: TokenLogprobs) -> None:
    assert got is not None
    assert (got.token_id, got.rank) == (wanted.token_id, wanted.rank)
    assert got.logprob == pytest.approx(wanted.logprob, rel=1e-5, abs=1e-5)
    assert [i for i, _ in got.top] == [i for i, _ in wanted.top]
    assert [p for _, p in got.top] == pytest.approx([p for _, p in wanted.top], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("vocab_size", [10, 64, 70, WIDE])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_scores_are_what_the_description_says(vocab_size: int, num_top: int) -> None:
    logits = make_logits(8, vocab_size)
    token_ids = torch.arange(8) * 7 % vocab_size
    scores = score(logits, token_ids, num_top).unpack([num_top] * 8)
    for row, token_id, got in zip(logits, token_ids.tolist(), scores, strict=True):
        check(got, expected(row, token_id, min(num_top, vocab_size)))


def test_equals_rank_alike_and_are_listed_by_id() -> None:
    (got,) = score(torch.tensor([[1.0, 3.0, 1.0, 3.0, -2.0]]), torch.tensor([2]), 4).unpack([4])
    assert got is not None
    assert got.rank == 3
    assert [token_id for token_id, _ in got.top] == [1, 3, 0, 2]


def test_each_row_has_as_many_of_the_likeliest_as_it_wants() -> None:
    scores = score(make_logits(3, 100), torch.tensor([1, 2, 3]), 5).unpack([0, 5, 2])
    assert [len(each.top) for each in scores if each] == [0, 5, 2]


def test_logprobs_are_finite() -> None:
    logits = torch.full((1, 70), float("-inf"))
    logits[0, 3] = 0.0
    logits[0, 5] = -1e9
    (got,) = score(logits, torch.tensor([9]), 3).unpack([3])
    assert got == TokenLogprobs(9, LEAST, 3, ((3, 0.0), (5, LEAST), (0, LEAST)))


def test_far_tokens_keep_their_order() -> None:
    """Logprobs whose probabilities are zero in float32."""
    (got,) = score(torch.tensor([[0.0, -500.0, -400.0, -600.0]]), torch.tensor([3]), 4).unpack([4])
    assert got == TokenLogprobs(3, -600.0, 4, ((0, 0.0), (2, -400.0), (1, -500.0), (3, -600.0)))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), "all -inf"])
def test_unusable_rows_have_none_and_their_neighbours_are_well(broken: float | str) -> None:
    logits = make_logits(3, 70)
    before = score(logits, torch.tensor([1, 2, 3]), 2).unpack([2] * 3)
    if isinstance(broken, str):
        logits[1] = float("-inf")
    else:
        logits[1, 40] = broken
    assert score(logits, torch.tensor([1, 2, 3]), 2).unpack([2] * 3) == [before[0], None, before[2]]


@given(
    st.integers(1, 200),
    st.integers(0, 20),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.randoms(use_true_random=False),
)
def test_a_row_alone_and_among_others_is_the_same(num_rows: int, num_top: int, dtype: torch.dtype, rng) -> None:
    logits = make_logits(num_rows, WIDE, scale=1.0).round(decimals=1).to(dtype)  # many equals
    token_ids = torch.tensor([rng.randrange(WIDE) for _ in range(num_rows)])
    together = score(logits, token_ids, 20).unpack([num_top] * num_rows)
    for i in {0, num_rows - 1, rng.randrange(num_rows)}:
        assert score(logits[i : i + 1], token_ids[i : i + 1], num_top).unpack([num_top]) == [together[i]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_scores_the_same() -> None:
    logits, token_ids = make_logits(100, WIDE), torch.arange(100)
    there = score(logits.cuda(), token_ids.cuda(), 5).to_host()
    torch.cuda.synchronize()
    for got, wanted in zip(there.unpack([5] * 100), score(logits, token_ids, 5).unpack([5] * 100), strict=True):
        assert wanted is not None
        check(got, wanted)
