"""Figures of two servers beside each other, and their ratios. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from statistics import median
from typing import Any, Literal

from loadtest.report import Quantiles, Summary

Side = Literal["a", "b"]
Figure = Callable[[Summary], float]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        return cls(median(ordered), ordered[0], ordered[-1])

    def to_json(self) -> dict[str, float] | None:
        """None when some value was NaN, which JSON does not have."""
        return asdict(self) if isfinite(sum(asdict(self).values())) else None


@dataclass(slots=True)
class Cell:
    """All rounds at one concurrency."""

    concurrency: int
    a: list[Summary] = field(default_factory=list)
    b: list[Summary] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        """Requests that failed, on either side."""
        return sum(summary.num_failed for summary in (*self.a, *self.b))

    def side(self, side: Side) -> list[Summary]:
        """The rounds of one side."""
        return self.a if side == "a" else self.b

    def ratio(self, figure: Figure) -> Spread:
        """a's figure over b's, taken within each round; NaN where a round has no such figure, or b's is 0."""
        pairs = [(figure(a), figure(b)) for a, b in zip(self.a, self.b, strict=True)]
        return Spread.of(of_a / of_b if of_b else nan for of_a, of_b in pairs)

    def ahead(self, figure: Figure) -> Spread:
        """How many times as good a is as b: the ratio, or for a time its inverse. Above 1, a is ahead."""
        return Cell(self.concurrency, self.b, self.a).ratio(figure) if figure in TIMES else self.ratio(figure)

    def to_json(self) -> dict[str, Any]:
        """Ratios, and every figure of every round."""
        return {
            "concurrency": self.concurrency,
            "ratios": {name: self.ratio(figure).to_json() for name, figure in FIGURES.items()},
            "a": [summary.to_json() for summary in self.a],
            "b": [summary.to_json() for summary in self.b],
        }


def output_tokens_per_s(summary: Summary) -> float:
    """Higher is better."""
    return summary.output_tokens_per_s


def itl_p50_ms(summary: Summary) -> float:
    """Lower is better."""
    return _p50_ms(summary.itl_s)


def ttft_p50_ms(summary: Summary) -> float:
    """Lower is better."""
    return _p50_ms(summary.ttft_s)


def _p50_ms(times: Quantiles | None) -> float:
    return nan if times is None else 1000 * times.p50


FIGURES: dict[str, Figure] = {
    "output_tokens_per_s": output_tokens_per_s,
    "itl_p50_ms": itl_p50_ms,
    "ttft_p50_ms": ttft_p50_ms,
}
TIMES = (itl_p50_ms, ttft_p50_ms)
"""The figures of which less is better."""


def markdown(cells: Iterable[Cell], a_name: str, b_name: str) -> str:
    """A table for RESULTS.md: medians of the rounds, and how far a is ahead, with the range over the rounds."""
    header = ["c"]
    for label in ("tok/s", "ITL p50 ms", "TTFT p50 ms"):
        header += [f"{label}, {a_name}", b_name, "times as good (range)"]
    rows = [header]
    for cell in cells:
        row = [str(cell.concurrency)]
        for figure in FIGURES.values():
            row += [f"{median(map(figure, side)):.1f}" for side in (cell.a, cell.b)]
            ahead = cell.ahead(figure)
            row.append(f"**{ahead.median:.2f}** ({ahead.min:.2f}-{ahead.max:.2f})")
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
