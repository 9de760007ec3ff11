"""What is noted of one request. Times are time.perf_counter()."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

CountedBy = Literal["usage", "chunks"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request did not bring what was asked for."""

    kind: str
    """A short name to count by: `timeout`, `connection`, `truncated`, `http 503`, `error event`, `bad stream`."""
    message: str


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request's times and counts."""

    started_s: float
    """When it was sent; in an open loop, when it was due."""
    finished_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    """Arrival of each chunk that stands for output. Chunks that came in one piece have the same time."""
    num_prompt_tokens: int | None = None
    """None: neither the server nor the request says."""
    num_cached_tokens: int = 0
    """Prompt tokens that the server says its prefix cache had."""
    num_output_tokens: int = 0
    counted_by: CountedBy = "chunks"
    """Where `num_output_tokens` is from: the server's usage, or one for each chunk."""
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from the start to the first chunk."""
        return self.chunk_times_s[0] - self.started_s if self.chunk_times_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latency: each gap between one chunk and the next."""
        return [after - before for before, after in pairwise(self.chunk_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, over the whole request; None with fewer than two tokens."""
        if not self.chunk_times_s or self.num_output_tokens < 2:
            return None
        return (self.finished_s - self.chunk_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From the start to the end of the response."""
        return self.finished_s - self.started_s
