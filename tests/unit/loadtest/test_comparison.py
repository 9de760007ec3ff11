"""Ratios are taken within a round, and shown as a median with its range; the order of the sides alternates."""

from __future__ import annotations

import pytest

from loadtest.compare import in_turn, round_spec
from loadtest.comparison import Cell, Spread, itl_p50_ms, markdown, output_tokens_per_s
from loadtest.record import RequestRecord
from loadtest.report import Summary, summarize
from loadtest.runner import RunResult
from loadtest.workload import LoadSpec


def run(tokens_per_s: float, *, itl_s: float | None = 0.5) -> Summary:
    """A run of one request with two chunks, or one."""
    chunks = [1.0, 1.0 + itl_s] if itl_s is not None else [1.0]
    record = RequestRecord(started_s=0.0, finished_s=2.0, chunk_times_s=chunks, num_output_tokens=100)
    return summarize(RunResult([record], duration_s=100 / tokens_per_s, client_cpu_s=0.0))


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that becomes half as fast between rounds changes no ratio."""
    cell = Cell(8, a=[run(100.0), run(50.0), run(75.0)], b=[run(50.0), run(25.0), run(25.0)])
    assert cell.ratio(output_tokens_per_s) == Spread(median=2.0, min=2.0, max=3.0)


def test_markdown() -> None:
    cell = Cell(8, a=[run(100.0), run(50.0), run(75.0)], b=[run(50.0), run(25.0), run(25.0)])
    assert markdown([cell], "ours", "theirs").splitlines() == [
        "| c | tok/s, ours | theirs | times as good (range) | ITL p50 ms, ours | theirs | times as good (range) "
        "| TTFT p50 ms, ours | theirs | times as good (range) |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| 8 | 75.0 | 25.0 | **2.00** (2.00-3.00) | 500.0 | 500.0 | **1.00** (1.00-1.00) "
        "| 1000.0 | 1000.0 | **1.00** (1.00-1.00) |",
    ]


@pytest.mark.parametrize("other", [None, 0.0])
def test_a_ratio_that_cannot_be_is_null_in_json(other: float | None) -> None:
    cell = Cell(1, a=[run(10.0)], b=[run(10.0, itl_s=other)])
    ratios = cell.to_json()["ratios"]
    assert ratios["itl_p50_ms"] is None
    assert ratios["output_tokens_per_s"] == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_of_times_the_shorter_is_ahead() -> None:
    cell = Cell(1, a=[run(10.0, itl_s=0.25), run(10.0, itl_s=0.125)], b=[run(20.0, itl_s=0.5)] * 2)
    assert cell.ahead(itl_p50_ms) == Spread(median=3.0, min=2.0, max=4.0)
    assert cell.ahead(output_tokens_per_s) == Spread(median=0.5, min=0.5, max=0.5)


def test_itl_in_ms() -> None:
    assert itl_p50_ms(run(10.0, itl_s=0.25)) == pytest.approx(250.0)


def test_sides_take_turns_at_going_first() -> None:
    assert list(in_turn(3, [1, 8])) == [
        (0, 1, ("a", "b")),
        (0, 8, ("a", "b")),
        (1, 1, ("b", "a")),
        (1, 8, ("b", "a")),
        (2, 1, ("a", "b")),
        (2, 8, ("a", "b")),
    ]


def test_no_two_cells_have_the_same_prompts() -> None:
    spec = LoadSpec(seed=1)
    specs = [round_spec(spec, number, c, per_client=3, at_least=8) for number in range(3) for c in (1, 8, 64)]
    assert len({each.seed for each in specs} | {spec.seed}) == 10
    assert [each.num_requests for each in specs[:3]] == [8, 24, 192]
