"""Figures of a run, from its records. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from loadtest.record import RequestRecord
from loadtest.runner import RunResult


@dataclass(frozen=True, slots=True)
class Quantiles:
    """How a set of times is spread, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles | None:
        """None when there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (percentile(ordered, q) for q in (0.5, 0.9, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], q: float) -> float:
    """The `q` quantile (0 to 1) of sorted values, linear between the two nearest, as numpy's default."""
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Failures of one kind."""

    count: int
    example: str
    """The first one's message."""
    after_s: Quantiles
    """How long they took: for a refusal, until the client knew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one run. Tokens and times are those of the requests that succeeded."""

    duration_s: float
    num_requests: int
    num_completed: int
    errors: dict[str, ErrorCount]
    tokens_counted_by: Literal["usage", "chunks", "mixed"]
    num_chunks: int
    """Pieces the output came in: fewer than tokens when the server sends several at once."""
    num_output_tokens: int
    num_prompt_tokens: int | None
    """None when not known of every request."""
    num_cached_tokens: int
    ttft_s: Quantiles | None
    itl_s: Quantiles | None
    tpot_s: Quantiles | None
    e2e_s: Quantiles | None
    client_cpu_s: float

    @property
    def num_failed(self) -> int:
        return self.num_requests - self.num_completed

    @property
    def requests_per_s(self) -> float:
        return self.num_completed / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s

    @property
    def total_tokens_per_s(self) -> float | None:
        """Prompt and output together."""
        if self.num_prompt_tokens is None:
            return None
        return (self.num_prompt_tokens + self.num_output_tokens) / self.duration_s

    def to_json(self) -> dict[str, Any]:
        """Every figure, derived ones too."""
        return asdict(self) | {
            "num_failed": self.num_failed,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
        }


def summarize(result: RunResult) -> Summary:
    """The figures of `result`."""
    completed = [record for record in result.records if record.failure is None]
    prompts = [record.num_prompt_tokens for record in completed]
    return Summary(
        duration_s=result.duration_s,
        num_requests=len(result.records),
        num_completed=len(completed),
        errors=_count_errors(result.records),
        tokens_counted_by=_counted_by(completed),
        num_chunks=sum(len(record.chunk_times_s) for record in completed),
        num_output_tokens=sum(record.num_output_tokens for record in completed),
        num_prompt_tokens=None if None in prompts else sum(filter(None, prompts)),
        num_cached_tokens=sum(record.num_cached_tokens for record in completed),
        ttft_s=Quantiles.of(record.ttft_s for record in completed if record.ttft_s is not None),
        itl_s=Quantiles.of(gap for record in completed for gap in record.itl_s),
        tpot_s=Quantiles.of(record.tpot_s for record in completed if record.tpot_s is not None),
        e2e_s=Quantiles.of(record.e2e_s for record in completed),
        client_cpu_s=result.client_cpu_s,
    )


def _count_errors(records: Iterable[RequestRecord]) -> dict[str, ErrorCount]:
    failures: dict[str, list[tuple[str, float]]] = {}
    for record in records:
        if record.failure is not None:
            failures.setdefault(record.failure.kind, []).append((record.failure.message, record.e2e_s))
    counts = {}
    for kind, found in failures.items():
        times = Quantiles.of(after_s for _, after_s in found)
        assert times is not None
        counts[kind] = ErrorCount(len(found), found[0][0], times)
    return counts


def _counted_by(completed: Sequence[RequestRecord]) -> Literal["usage", "chunks", "mixed"]:
    kinds = {record.counted_by for record in completed}
    return "mixed" if len(kinds) == 2 else next(iter(kinds), "usage")
