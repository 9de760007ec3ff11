from __future__ import annotations

import itertools

import pytest
import torch

from engine.sample import ops


def make_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0, ties: bool = False):
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.round() if ties else logits


def make_probs(num_rows: int, vocab_size: int, **settings):
    return torch.softmax(ops.pad_to_blocks(make_logits(num_rows, vocab_size, **settings)), -1)


def by_rank(row):
    """The ranking of a row as its definition has it: most probable first, equals by id."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def make_filters(vocab_size: int, *rows: tuple[int, float, float]):
    top_k, top_p, min_p = zip(*rows, strict=True)
    return ops.Filters(
        torch.tensor([k or vocab_size for k in top_k]),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float32),
    )


@pytest.fixture
def two_threads():
    """Work that is split among threads must come out the same; unit tests have one thread otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# --- A row's numbers are its own, bit for bit ---


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"),
    [*itertools.product([2, 3, 17, 40], [1, 50, 64, 100, 4096, 5000]), (3, 50257), (17, 50257)],
)
def test_no_bit_depends_on_the_number_of_rows(num_rows, vocab_size):
    logits = ops.pad_to_blocks(make_logits(num_rows, vocab_size))
    temperature = torch.linspace(0.1, 2, num_rows)
    u = torch.linspace(0.01, 0.99, num_rows, dtype=torch.float64)
    probs = ops.probabilities(logits, temperature)
    cdf = ops.block_cdf(probs)
    tokens = ops.draw(probs, cdf, u)
    ranked = ops.ranking(probs)
    for i in {0, num_rows // 2, num_rows - 1}:
        alone = slice(i, i + 1)
        probs_alone = ops.probabilities(logits[alone], temperature[alone])
        cdf_alone = ops.block_cdf(probs_alone)
        ranked_alone = ops.ranking(probs_alone)
        assert torch.equal(probs_alone, probs[alone])
        assert torch.equal(cdf_alone, cdf[alone])
        assert torch.equal(ops.draw(probs_alone, cdf_alone, u[alone]), tokens[alone])
        assert torch.equal(ranked_alone.token_ids, ranked.token_ids[alone])
        assert torch.equal(ranked_alone.cdf, ranked.cdf[alone])


# --- Ranking ---


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", [50, 64, 1000])
def test_ranking_is_by_probability_then_by_id(vocab_size, ties):
    probs = make_probs(5, vocab_size, ties=ties)
    ranked = ops.ranking(probs)
    for i, row in enumerate(probs.tolist()):
        assert ranked.token_ids[i].tolist() == by_rank(row)
    assert torch.equal(ranked.probs, probs.gather(1, ranked.token_ids))
    assert torch.allclose(ranked.cdf[:, -1], torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", [ops.BLOCK * ops.NUM_LEADERS, 5000])
def test_leaders_are_the_first_of_the_ranking(vocab_size, ties, scale):
    """With ties at the border too, of tokens and of blocks; scale 0 makes all tokens alike."""
    for seed in range(4):
        probs = make_probs(3, vocab_size, seed=seed, scale=scale, ties=ties)
        leaders, ranked = ops.leaders(probs), ops.ranking(probs)
        for name in ("token_ids", "probs", "cdf"):
            assert torch.equal(getattr(leaders, name), getattr(ranked, name)[:, : ops.NUM_LEADERS]), name


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", [5000, 20_000])
def test_a_shortlist_is_the_start_of_the_ranking_and_long_enough(vocab_size, ties, scale):
    """Scale 0 with 20,000 tokens: too many of them for a short list."""
    probs = make_probs(1, vocab_size, scale=scale, ties=ties)
    width = probs.shape[1]
    whole, mass = ops.ranking(probs), ops.block_cdf(probs)[:, -1]
    for each in [(65, 1.0, 0.0), (500, 0.9, 0.0), (0, 0.6, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.1), (900, 0.9, 0.01)]:
        filters = make_filters(width, each)
        listed = ops.shortlist(probs, mass, filters)
        length = listed.probs.shape[1]
        assert torch.equal(listed.token_ids, whole.token_ids[:, :length])
        assert torch.equal(listed.cdf, whole.cdf[:, :length])
        kept, known = ops.kept(listed, mass, width, filters)
        assert known.tolist() == [True]
        assert kept.tolist() == ops.kept(whole, mass, width, filters)[0].tolist()


def test_a_shortlist_is_short():
    """No longer than what is kept and its neighbours within an eighth."""
    probs = make_probs(1, 20_000, scale=3.0)
    mass = ops.block_cdf(probs)[:, -1]
    for each in [(200, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.01)]:
        filters = make_filters(probs.shape[1], each)
        listed = ops.shortlist(probs, mass, filters)
        kept, _ = ops.kept(listed, mass, probs.shape[1], filters)
        last = listed.probs[0, kept[0] - 1]
        assert listed.probs.min() >= last / 1.125


# --- Filters ---

# Ranked: tokens 2, 0, 3, 1, 4.
PROBS = torch.tensor([[0.25, 0.125, 0.375, 0.1875, 0.0625]])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "num_kept"),
    [
        (0, 1.0, 0.0, 5),
        (1, 1.0, 0.0, 1),
        (3, 1.0, 0.0, 3),
        (5, 1.0, 0.0, 5),
        (0, 1e-9, 0.0, 1),
        (0, 0.375, 0.0, 1),  # exactly reached
        (0, 0.376, 0.0, 2),
        (0, 0.9999, 0.0, 5),
        (0, 1.0, 0.5, 3),  # 0.1875 is exactly half of 0.375
        (0, 1.0, 0.51, 2),
        (0, 1.0, 1.0, 1),
        # top_p counts shares of what the others left: 0.375 + 0.25 of 0.625, not of 1.
        (2, 0.6, 0.0, 1),
        (2, 0.61, 0.0, 2),
        (0, 0.6, 0.51, 1),
        (0, 0.61, 0.51, 2),
        (4, 1.0, 0.51, 2),
        (2, 1.0, 0.2, 2),
    ],
)
def test_how_many_tokens_are_kept(top_k, top_p, min_p, num_kept):
    ranked = ops.ranking(PROBS)
    kept, known = ops.kept(ranked, ranked.cdf[:, -1], 5, make_filters(5, (top_k, top_p, min_p)))
    assert (kept.tolist(), known.tolist()) == ([num_kept], [True])


def test_equals_are_kept_by_id_and_no_more_than_asked_for():
    probs = torch.full((1, 64), 1 / 64)
    ranked = ops.ranking(probs)
    kept, _ = ops.kept(ranked, ranked.cdf[:, -1], 64, make_filters(64, (3, 1.0, 0.0)))
    assert ranked.token_ids[0, : kept[0]].tolist() == [0, 1, 2]
    kept, _ = ops.kept(ranked, ranked.cdf[:, -1], 64, make_filters(64, (0, 0.1, 0.0)))
    assert kept.tolist() == [7]


def test_leaders_say_when_they_do_not_reach_far_enough():
    vocab_size = 5000
    probs = torch.full((1, ops.BLOCK * 79), 0.0)
    probs[0, :vocab_size] = 1 / vocab_size  # the 64 leaders have 1.28 % of the mass
    leaders, whole = ops.leaders(probs), ops.ranking(probs)
    settings = {
        (64, 1.0, 0.0): True,
        (65, 1.0, 0.0): False,
        (0, 0.0127, 0.0): True,
        (0, 0.0129, 0.0): False,
        (0, 1.0, 0.5): False,  # all are alike, so all pass
        (64, 0.5, 0.0): True,
        (100, 0.001, 0.0): False,
        (0, 0.001, 0.5): False,
    }
    for each, expected in settings.items():
        filters = make_filters(probs.shape[1], each)
        mass = whole.cdf[:, -1]
        kept, known = ops.kept(leaders, mass, probs.shape[1], filters)
        kept_of_all, known_of_all = ops.kept(whole, mass, probs.shape[1], filters)
        assert known.tolist() == [expected], each
        assert known_of_all.tolist() == [True]
        assert not expected or kept.tolist() == kept_of_all.tolist(), each


# --- Drawing ---


@pytest.mark.parametrize("vocab_size", [5, 64, 200, 5000])
def test_draw_inverts_the_distribution_function(vocab_size):
    probs = make_probs(1, vocab_size, scale=1.0)
    ends = probs[0].double().cumsum(0)
    ends /= ends[-1].clone()
    middles = (ends - probs[0].double() / 2)[:vocab_size]
    rows = probs.expand(vocab_size, -1)
    assert ops.draw(rows, ops.block_cdf(rows), middles).tolist() == list(range(vocab_size))


def test_draw_at_the_ends_finds_tokens_that_are_possible():
    probs = torch.zeros(2, 256)
    probs[:, 70], probs[:, 130] = 0.25, 0.75
    u = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert ops.draw(probs, ops.block_cdf(probs), u).tolist() == [70, 130]


def test_draw_never_finds_an_impossible_token():
    """Also where float32 and float64 sums of a block differ: every other token is impossible, the last ones too."""
    probs = make_probs(1, 4096, scale=0.5)
    probs[:, 1::2] = 0
    probs[:, -7:] = 0
    rows = probs.expand(2000, -1)
    cdf = ops.block_cdf(rows)
    # On both sides of each block's end, as near as float64 goes.
    ends = (cdf[0, :-1] / cdf[0, -1]).repeat(32)[:2000]
    for toward in (0.0, 1.0):
        tokens = ops.draw(rows, cdf, torch.nextafter(ends, torch.full_like(ends, toward)))
        assert (rows.gather(1, tokens[:, None]) > 0).all()


def test_draw_ranked_stays_within_what_is_kept():
    ranked = ops.ranking(PROBS.expand(4, -1))
    u = torch.tensor([2.0**-53, 0.59, 0.61, 1 - 2.0**-53], dtype=torch.float64)
    assert ops.draw_ranked(ranked, torch.full((4,), 2), u).tolist() == [2, 2, 0, 0]


# --- Greedy ---


@pytest.mark.parametrize("vocab_size", [1, 50, 64, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_greedy_takes_the_first_of_the_largest(vocab_size, ties):
    logits = make_logits(20, vocab_size, ties=ties)
    tokens, usable = ops.greedy(ops.pad_to_blocks(logits))
    assert tokens.tolist() == [by_rank(row)[0] for row in logits.tolist()]
    assert usable.all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("token", [0, 63, 64, 99])
def test_greedy_notices_one_unusable_logit(value, token):
    logits = make_logits(3, 100)
    logits[1, token] = value
    assert ops.greedy(ops.pad_to_blocks(logits))[1].tolist() == [True, False, True]
