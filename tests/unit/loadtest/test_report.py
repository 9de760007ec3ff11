"""Summaries: every figure from known records."""

from __future__ import annotations

import json

import pytest

from loadtest.record import Failure, RequestRecord
from loadtest.report import Quantiles, percentile, summarize
from loadtest.runner import RunResult


def record(start: float, *chunks: float, end: float, prompt: int | None = 10, output: int = 0) -> RequestRecord:
    """A request with chunks at those times; `output` tokens by usage, or one a chunk when 0."""
    return RequestRecord(
        started_s=start,
        finished_s=end,
        chunk_times_s=list(chunks),
        num_prompt_tokens=prompt,
        num_output_tokens=output or len(chunks),
        counted_by="usage" if output else "chunks",
    )


def failed(kind: str, message: str) -> RequestRecord:
    broken = record(0.0, 1.0, end=99.0)
    broken.failure = Failure(kind, message)
    return broken


@pytest.mark.parametrize(("q", "value"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_percentile_is_linear(q: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], q) == pytest.approx(value)


def test_quantiles_of_unsorted_values() -> None:
    assert Quantiles.of([3.0, 1.0, 2.0]) == Quantiles(mean=2.0, p50=2.0, p90=2.8, p99=2.98, max=3.0)
    assert Quantiles.of([]) is None


def test_figures() -> None:
    records = [record(0.0, 1.0, 1.5, end=2.0, output=5), record(1.0, 4.0, 6.0, end=7.0, output=3)]
    summary = summarize(RunResult(records, duration_s=4.0, client_cpu_s=0.2))
    assert summary.ttft_s is not None
    assert (summary.ttft_s.mean, summary.ttft_s.max) == (2.0, 3.0)
    assert summary.itl_s is not None
    assert (summary.itl_s.p50, summary.itl_s.max) == (1.25, 2.0)
    assert summary.tpot_s is not None
    assert summary.tpot_s.max == 1.5  # 3 s after the first chunk, two tokens after the first
    assert summary.e2e_s is not None
    assert summary.e2e_s.mean == 4.0
    assert (summary.num_output_tokens, summary.num_prompt_tokens, summary.num_chunks) == (8, 20, 4)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.5, 2.0, 7.0)
    assert summary.tokens_counted_by == "usage"


def test_failed_requests_count_as_errors_and_in_nothing_else() -> None:
    records = [
        failed("http 503", "first"),
        record(0.0, 1.0, end=1.0),
        failed("http 503", "second"),
        failed("timeout", "t"),
    ]
    summary = summarize(RunResult(records, duration_s=1.0, client_cpu_s=0.0))
    assert (summary.num_requests, summary.num_completed, summary.num_failed) == (4, 1, 3)
    counts = {kind: (error.count, error.example) for kind, error in summary.errors.items()}
    assert counts == {"http 503": (2, "first"), "timeout": (1, "t")}
    assert summary.num_output_tokens == 1
    assert summary.e2e_s is not None
    assert summary.e2e_s.max == 1.0


def test_who_counted_is_stated() -> None:
    by_usage, by_chunks = record(0.0, 1.0, end=1.0, output=2), record(0.0, 1.0, end=1.0)
    assert summarize(RunResult([by_chunks], 1.0, 0.0)).tokens_counted_by == "chunks"
    assert summarize(RunResult([by_chunks, by_usage], 1.0, 0.0)).tokens_counted_by == "mixed"


def test_one_unknown_prompt_length_makes_the_total_unknown() -> None:
    records = [record(0.0, 1.0, end=1.0), record(0.0, 1.0, end=1.0, prompt=None)]
    summary = summarize(RunResult(records, 1.0, 0.0))
    assert summary.num_prompt_tokens is None
    assert summary.total_tokens_per_s is None


def test_a_run_where_all_fails_still_has_a_summary() -> None:
    summary = summarize(RunResult([failed("timeout", "t")], duration_s=1.0, client_cpu_s=0.0))
    assert (summary.ttft_s, summary.itl_s, summary.tpot_s, summary.e2e_s) == (None, None, None, None)
    assert summary.output_tokens_per_s == 0.0


def test_json_has_every_figure() -> None:
    summary = summarize(RunResult([record(0.0, 1.0, 2.0, end=2.0), failed("timeout", "t")], 2.0, 0.5))
    document = json.loads(json.dumps(summary.to_json()))
    assert document["output_tokens_per_s"] == 1.0
    assert document["num_failed"] == 1
    after_s = {"mean": 99.0, "p50": 99.0, "p90": 99.0, "p99": 99.0, "max": 99.0}
    assert document["errors"] == {"timeout": {"count": 1, "example": "t", "after_s": after_s}}
    assert document["ttft_s"] == {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
