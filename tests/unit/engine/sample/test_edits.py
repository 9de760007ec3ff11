"""Masks, bias and penalties against their description, in Python floats, and rows against their neighbours."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.params import SamplingParams
from engine.plan import PlanRow
from engine.sample import Sampler
from engine.sample.edits import edits_of

VOCAB_SIZE = 70
MASK_BYTES = 9
INF = float("inf")


def make_row(
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    *,
    banned: frozenset[int] = frozenset(),
    mask: bytes | None = None,
    seed: int = 0,
    **params: object,
) -> PlanRow:
    """A decoding row: its last known token is computed, the next is sampled."""
    context = array("q", [*prompt, *output])
    return PlanRow(
        request_id=0,
        token_ids=context[-1:],
        start=len(context) - 1,
        block_ids=[0],
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
        context=context,
        num_prompt_tokens=len(prompt),
        banned_token_ids=banned,
        mask=None if mask is None else lambda: mask,
    )


def edited(logits: torch.Tensor, rows: Sequence[PlanRow]) -> torch.Tensor:
    logits = logits.clone()
    for edit, chosen in edits_of(rows):
        edit(logits, chosen)
    return logits


def expected(logits: Sequence[float], row: PlanRow) -> list[float]:
    """One row, straight from the description, in its order."""
    params, context = row.sampling, list(row.context)
    assert params is not None
    output = context[row.num_prompt_tokens :]

    def edited_value(token: int, value: float) -> float:
        bias = params.logit_bias.get(token, 0.0)
        is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        if row.mask is not None and not row.mask()[token // 8] >> token % 8 & 1:
            return -INF
        if not is_allowed or token in row.banned_token_ids or bias == -100:
            return -INF
        value += bias
        if token in context:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        return value - params.presence_penalty * (token in output)

    return [edited_value(token, value) for token, value in enumerate(logits)]


tokens = st.integers(0, VOCAB_SIZE - 1)
row_strategy = st.builds(
    make_row,
    st.lists(tokens, min_size=1, max_size=12),
    st.lists(st.integers(0, 9), max_size=12),
    banned=st.frozensets(tokens, max_size=3),
    mask=st.none() | st.binary(min_size=MASK_BYTES, max_size=MASK_BYTES),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -99.5, 0.0, 2.5, 100.0]), max_size=4),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=8, max_size=20).map(tuple),
)


@settings(max_examples=200)
@given(st.lists(row_strategy, min_size=1, max_size=5), st.integers(0, 2**31))
def test_edits_are_what_the_description_says_whoever_the_neighbours_are(rows: list[PlanRow], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    together = edited(logits, rows)
    for i, row in enumerate(rows):
        assert torch.equal(edited(logits[i : i + 1], [row])[0], together[i])
        torch.testing.assert_close(together[i], torch.tensor(expected(logits[i].tolist(), row)))


@settings(max_examples=100)
@given(st.lists(row_strategy, min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_row_gets_the_same_token_alone_and_among_others(rows: list[PlanRow], seed: int) -> None:
    """One sampler for all of them, so that whatever it kept from one would show in the next."""
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    sampler = Sampler()
    together = sampler.sample(logits, rows)
    plain = sampler.sample(logits, [make_row()] * len(rows))
    for i, row in enumerate(rows):
        alone = sampler.sample(logits[i : i + 1], [row])
        assert alone[0] == together[i]
        assert sampler.sample(logits[i : i + 1], [make_row()])[0] == plain[i]
    assert torch.equal(logits, before)


def sample(logits: Sequence[float], row: PlanRow) -> int:
    [token_id] = Sampler().sample(torch.tensor([logits]), [row]).tolist()
    assert token_id >= 0
    return int(token_id)


@pytest.mark.parametrize(
    ("params", "token"),
    [
        ({}, 0),
        ({"logit_bias": {0: -100}}, 1),
        ({"logit_bias": {3: 5.0}}, 3),
        ({"logit_bias": {3: 5.0, 0: 100.0}}, 0),
        ({"allowed_token_ids": (2, 3)}, 2),
        ({"repetition_penalty": 3.0}, 1),
        ({"presence_penalty": 1.5}, 1),
        ({"frequency_penalty": 0.6}, 1),
        ({"frequency_penalty": 0.8, "logit_bias": {1: -100.0}}, 2),
    ],
)
@pytest.mark.parametrize("choice", [{"temperature": 0.0}, {"top_k": 1}])
def test_greedy_rows_are_edited_too(params: dict[str, object], choice: dict[str, float], token: int) -> None:
    assert sample([4.0, 3.0, 2.5, 1.0], make_row([3], [0, 0], **params, **choice)) == token


def test_penalties_count_the_output_and_repetition_the_prompt_too() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0]])
    assert edited(logits, [make_row([0, 1], [2], presence_penalty=0.5)]).tolist() == [[2.0, -2.0, 0.5, 1.0]]
    assert edited(logits, [make_row([0, 1], [2], repetition_penalty=2.0)]).tolist() == [[1.0, -4.0, 0.5, 1.0]]


def test_only_tokens_before_the_sampled_one_count() -> None:
    """A row in the middle of its known tokens, as when it is computed again, sees what it saw the first time."""
    row = PlanRow(0, [5], 1, [0], SamplingParams(presence_penalty=1.0), context=[4, 5, 6, 7], num_prompt_tokens=1)
    assert edited(torch.zeros(1, 8), [row])[0].nonzero()[:, 0].tolist() == [5]


def test_an_extreme_penalty_leaves_numbers() -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0, 0.0]])
    values = edited(logits, [make_row([0, 1], repetition_penalty=1e-30)] * 1)
    assert values.isfinite().all()
    assert sample(logits[0].tolist(), make_row([0, 1], repetition_penalty=1e-38, temperature=1e-5)) == 0


def test_penalties_do_not_hide_broken_logits() -> None:
    for broken in (math.nan, INF):
        row = make_row([0], repetition_penalty=2.0)
        assert Sampler().sample(torch.tensor([[broken, 1.0, 0.0]]), [row]).tolist() == [-1]


def test_rows_without_edits_are_not_looked_at() -> None:
    assert edits_of([make_row([1], [2, 3]), make_row(temperature=0.0, top_p=0.5)]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@settings(max_examples=30)
@given(st.lists(row_strategy, min_size=1, max_size=5), st.integers(0, 2**31))
def test_cuda_edits_the_same(rows: list[PlanRow], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    torch.testing.assert_close(edited(logits.cuda(), rows).cpu(), edited(logits, rows))


def test_logits_that_are_no_numbers_stay_so_where_a_mask_bans_them() -> None:
    """So that the row fails, as it would without a grammar."""
    row = make_row(mask=b"\x01" + bytes(MASK_BYTES - 1), temperature=0)
    logits = torch.zeros(1, VOCAB_SIZE)
    assert Sampler().sample(logits, [row]).tolist() == [0]
    logits[0, 5] = float("nan")
    assert Sampler().sample(logits, [row]).tolist() == [-1]


def test_a_mask_that_leaves_nothing_makes_the_row_bad() -> None:
    tokens = Sampler().sample(torch.zeros(2, VOCAB_SIZE), [make_row(mask=bytes(MASK_BYTES)), make_row()])
    assert (tokens < 0).tolist() == [True, False]
