from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu.back_end import CpuKernels
from engine.kernels.cpu.library import variants
from engine.params import SamplingParams
from engine.plan import PlanRow
from engine.sample import Sampler, ops
from engine.sample.random import uniform
from tests.cpu_kernels import build_kernels

WIDE = ops.BLOCK * ops.NUM_LEADERS + 100  # wide enough for the leaders to be looked at first

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.5, top_k=50),
    SamplingParams(temperature=1.5, top_k=100),
    SamplingParams(temperature=1.0, top_k=10**9),
    SamplingParams(temperature=1.0, top_k=-1),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.99),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=3.0, min_p=0.001),
    SamplingParams(temperature=1.2, top_k=40, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=2.0, top_k=900, top_p=0.95, min_p=0.001),
]


def describe(params: SamplingParams) -> str:
    return f"t{params.temperature:g}-k{params.top_k}-p{params.top_p:g}-m{params.min_p:g}"


def make_row(params: SamplingParams, *, seed: int = 0, position: int = 1) -> PlanRow:
    """A row whose sampled token gets this position."""
    return PlanRow(0, [0], position - 1, [0], params, seed)


def make_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


WAYS = {"ops": None, "C-avx512": "avx512", "C-avx2": "avx2"}
"""Ways to choose: in torch, and with the kernels of an instruction set."""


class Current:
    """What the tests sample with."""

    sampler = Sampler()


@pytest.fixture(scope="module", params=WAYS, autouse=True)
def _way(request: pytest.FixtureRequest):
    """Runs every test of this file with each of them."""
    variant = WAYS[request.param]
    if variant is None:
        Current.sampler = Sampler()
        return
    build_kernels()
    if variant not in variants():
        pytest.skip(f"this processor has no {variant}")
    Current.sampler = Sampler(CpuKernels(torch.float32, 32, variant).choose_tokens)


@pytest.fixture
def by_ops(request: pytest.FixtureRequest):
    """For what only the way in torch does."""
    if request.node.callspec.params["_way"] != "ops":
        pytest.skip("about ops")


def sample(logits: torch.Tensor, rows: Sequence[PlanRow]):
    token_ids = Current.sampler.sample(logits, rows)
    assert token_ids.dtype == torch.int64
    assert token_ids.shape == (len(rows),)
    return token_ids


def tokens(logits: torch.Tensor, rows: Sequence[PlanRow]) -> list[int]:
    token_ids = sample(logits, rows).tolist()
    assert min(token_ids) >= 0
    return token_ids


def probabilities(logits: Sequence[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((each - top) / temperature) for each in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def kept(probs: Sequence[float], params: SamplingParams) -> list[int]:
    """What the filters leave, in order of rank; straight from the description."""
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    ranked = [i for i in ranked if probs[i] >= params.min_p * probs[ranked[0]]]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    mass, so_far = sum(probs[i] for i in ranked), 0.0
    for count, i in enumerate(ranked, start=1):
        so_far += probs[i]
        if so_far >= params.top_p * mass:
            return ranked[:count]
    return ranked


def expected_token(logits: Sequence[float], row: PlanRow) -> int:
    """One row, in Python floats."""
    params = row.sampling
    if params.greedy:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    probs = probabilities(logits, params.temperature)
    filtered = 0 < params.top_k < len(logits) or params.top_p < 1 or params.min_p > 0
    order = kept(probs, params) if filtered else range(len(probs))
    target = uniform([row.seed], [row.end])[0] * sum(probs[i] for i in order)
    for i in order:
        target -= probs[i]
        if target < 0:
            return i
    raise AssertionError("u is below 1")


# --- Which token ---


@pytest.mark.parametrize("params", PARAMS, ids=describe)
@pytest.mark.parametrize("vocab_size", [50, 128, WIDE])
def test_tokens_are_what_the_description_says(params, vocab_size):
    logits = make_logits(8, vocab_size)
    rows = [make_row(params, seed=i * 1001, position=i + 1) for i in range(8)]
    assert tokens(logits, rows) == [expected_token(each, row) for each, row in zip(logits.tolist(), rows, strict=True)]


@pytest.mark.parametrize("params", PARAMS, ids=describe)
def test_flat_distributions_too(params):
    """Logits with few values: many ties, and filters that keep more than the leaders."""
    logits = make_logits(6, WIDE, scale=0.5).round()
    rows = [make_row(params, seed=i) for i in range(6)]
    assert tokens(logits, rows) == [expected_token(each, row) for each, row in zip(logits.tolist(), rows, strict=True)]


def test_the_position_is_that_of_the_new_token():
    """However the prompt was chunked: a row that ends at the same place draws the same number."""
    params, logits = SamplingParams(temperature=1.0), make_logits(1, 1000, scale=0.1).expand(3, -1)
    rows = [PlanRow(0, [0] * 9, 0, [0], params, 5), PlanRow(1, [0], 8, [0], params, 5), make_row(params, seed=5)]
    whole_prompt, last_chunk, elsewhere = tokens(logits, rows)
    assert whole_prompt == last_chunk != elsewhere


def test_the_number_that_decides_is_that_of_seed_and_position():
    """Of tokens that are all as likely, it is the place of the one that is chosen."""
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1]
    positions = [1, 2**20, 2**31, 2**32 + 7]
    rows = [make_row(SamplingParams(), seed=seed, position=position) for seed in seeds for position in positions]
    expected = uniform([row.seed for row in rows], [row.end for row in rows]) * 4096
    assert tokens(torch.zeros(len(rows), 4096), rows) == expected.astype(int).tolist()


def test_seeds_of_all_64_bits():
    logits = make_logits(1, 5000, scale=0.1).expand(4, -1)
    rows = [make_row(SamplingParams(), seed=seed) for seed in (0, 2**32, 2**63, 2**64 - 1)]
    assert len(set(tokens(logits, rows))) == 4


def test_top_k_1_is_greedy_and_ties_go_to_the_lowest_id():
    logits = torch.zeros(3, 100)
    logits[:, [20, 40, 90]] = 2.0
    rows = [make_row(SamplingParams(temperature=t, top_k=k), seed=7) for t, k in ((0.0, 0), (5.0, 1), (1e-6, 0))]
    assert tokens(logits, rows) == [20, 20, 20]


def test_a_tiny_top_p_is_greedy_too():
    logits = torch.zeros(1, WIDE)
    logits[:, [20, 4100]] = 2.0
    assert tokens(logits, [make_row(SamplingParams(top_p=1e-9), seed=3)]) == [20]


@pytest.mark.parametrize("vocab_size", [100, WIDE])
def test_filters_that_keep_all_are_off(vocab_size):
    logits = make_logits(8, vocab_size, scale=0.1)
    plain = tokens(logits, [make_row(SamplingParams(), seed=i) for i in range(8)])
    for params in (SamplingParams(top_k=vocab_size), SamplingParams(top_k=10**9), SamplingParams(top_k=-1)):
        assert tokens(logits, [make_row(params, seed=i) for i in range(8)]) == plain


def test_impossible_tokens_are_never_chosen():
    logits = torch.full((200, 300), float("-inf"))
    logits[:, [3, 150, 299]] = 0.0
    for params in PARAMS:
        rows = [make_row(params, seed=seed) for seed in range(200)]
        assert set(tokens(logits, rows)) <= {3, 150, 299}


# --- Frequencies ---


def chi_square_limit(degrees: int) -> float:
    """What chi-square exceeds once in 30,000 times, by the approximation of Wilson and Hilferty."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.0 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(("vocab_size", "num_positions"), [(30, 20_000), (WIDE, 4000)])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=12),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.2),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.05),
    ],
    ids=describe,
)
def test_frequencies_are_the_probabilities(params, vocab_size, num_positions):
    """Over many positions of one seed: nothing outside the kept tokens, and those in proportion."""
    logits = make_logits(1, 30, scale=1.0)
    logits = torch.cat([logits, torch.full((1, vocab_size - 30), -50.0)], dim=1)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for start in range(0, num_positions, 1000):
        rows = [make_row(params, seed=11, position=start + i + 1) for i in range(1000)]
        counts += torch.tensor(tokens(logits.expand(1000, -1), rows)).bincount(minlength=vocab_size)
    probs = probabilities(logits[0].tolist(), params.temperature)
    possible = [i for i in kept(probs, params) if i < 30]
    assert counts.sum() == counts[possible].sum()
    expected = torch.tensor([probs[i] for i in possible], dtype=torch.float64)
    expected *= num_positions / expected.sum()
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    assert chi_square < chi_square_limit(len(possible) - 1)


# --- Neighbours ---

POOL = make_logits(12, WIDE)
POOL[3] *= 0.05  # flat: needs its whole ranking
POOL[4] = POOL[4].round()
POOL[5, 10] = float("nan")
POOL[6] = float("-inf")
each_row = st.tuples(
    st.integers(0, len(POOL) - 1), st.sampled_from(PARAMS), st.integers(0, 2**64 - 1), st.integers(1, 10**6)
)


@settings(max_examples=40)
@given(st.lists(each_row, min_size=1, max_size=12), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_row_alone_and_among_others_is_the_same(batch, dtype):
    """Whoever its neighbours are, in whatever order, however they are sampled, broken ones included."""
    logits = POOL[[index for index, *_ in batch]].to(dtype)
    rows = [make_row(params, seed=seed, position=position) for _, params, seed, position in batch]
    together = sample(logits, rows)
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], [row])[0] == together[i]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened_first(dtype):
    logits = make_logits(len(PARAMS), WIDE).to(dtype)
    before = logits.clone()
    rows = [make_row(params, seed=i) for i, params in enumerate(PARAMS)]
    assert tokens(logits, rows) == tokens(logits.float(), rows)
    assert torch.equal(logits, before)


def test_logits_are_left_as_they_are():
    logits = make_logits(len(PARAMS), WIDE)
    before = logits.clone()
    for chosen in (PARAMS, [PARAMS[0]] * len(PARAMS), [PARAMS[2]] * len(PARAMS), [PARAMS[9]] * len(PARAMS)):
        tokens(logits, [make_row(params) for params in chosen])
        assert torch.equal(logits, before)


# --- Bad rows ---


@pytest.mark.parametrize("params", PARAMS, ids=describe)
@pytest.mark.parametrize("vocab_size", [100, WIDE])
def test_unusable_rows_are_flagged_and_their_neighbours_are_well(params, vocab_size):
    nan, inf = float("nan"), float("inf")
    logits = make_logits(7, vocab_size)
    logits[1, 17] = nan
    logits[2] = nan
    logits[3] = -inf
    logits[4, 99] = inf
    logits[5, :50] = -inf  # fine: these tokens are merely forbidden
    rows = [make_row(params, seed=i) for i in range(7)]
    token_ids = sample(logits, rows)
    assert token_ids[1:5].tolist() == [-1, -1, -1, -1]
    good = [0, 5, 6]
    assert token_ids[good].tolist() == tokens(logits[good], [rows[i] for i in good])


# --- Rows pay for what they use ---


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:

        def fail(*args: object, name: str = name) -> None:
            raise AssertionError(f"{name} is not needed here")

        monkeypatch.setattr(ops, name, fail)


@pytest.mark.usefixtures("by_ops")
def test_greedy_rows_never_enter_the_pipeline(monkeypatch):
    forbid(monkeypatch, "probabilities", "leaders", "shortlist", "ranking")
    tokens(make_logits(3, WIDE), [make_row(PARAMS[0])] * 3)


@pytest.mark.usefixtures("by_ops")
def test_rows_with_a_temperature_alone_are_not_ranked(monkeypatch):
    forbid(monkeypatch, "leaders", "shortlist", "ranking")
    tokens(make_logits(3, WIDE), [make_row(PARAMS[0]), make_row(PARAMS[2]), make_row(PARAMS[3])])


@pytest.mark.usefixtures("by_ops")
def test_rows_are_looked_at_one_by_one_only_where_the_leaders_do_not_decide(monkeypatch):
    looked_at = []
    shortlist = ops.shortlist
    monkeypatch.setattr(ops, "shortlist", lambda probs, *rest: looked_at.append(probs) or shortlist(probs, *rest))
    logits = make_logits(4, WIDE, scale=4.0)
    logits[2] = 0.0
    rows = [make_row(SamplingParams(top_p=0.5), seed=i) for i in range(4)]
    tokens(logits, rows)
    assert len(looked_at) == 1
    assert (looked_at[0][0, :WIDE] == 1 / WIDE).all()


# --- On a GPU ---


@pytest.mark.usefixtures("by_ops")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_chooses_the_same_tokens():
    """There every row is ranked whole, many at once: another way to the same result."""
    logits = make_logits(len(PARAMS) + 1, WIDE)
    logits[-1, 3] = float("nan")
    rows = [make_row(params, seed=i) for i, params in enumerate([*PARAMS, PARAMS[9]])]
    here, there = sample(logits, rows), sample(logits.cuda(), rows)
    assert there.is_cuda
    assert there.tolist() == here.tolist()
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1].cuda(), [row]).item() == there[i]
