"""Who is let in: bounds on the requests and prompt tokens that wait, asked before a prompt is tokenised.

A request takes a `Place` when its body has been read, and gives it back when its answer has ended, however it ends:
`ReleaseHeld`, a middleware, sees to that. What it brings is guessed from its bytes at first, and corrected when its
prompts have been tokenised. A request is refused when those before it leave no room; one that finds the queue empty is
let in whatever its size, since waiting would not help it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import Overloaded
from server.errors import TooManyRequests

if TYPE_CHECKING:
    from fastapi import Request

    from config.schema import Settings
    from engine.core import ModelInfo
    from engine.messages import StepReport

BYTES_PER_TOKEN = 4
"""Of text in English, about: the guess that stands while a prompt is tokenised."""

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Bounds of `Retry-After`."""
UNMEASURED_RETRY_S = 5.0
"""`Retry-After` while no request has begun yet."""

_QUEUE_PER_CACHE = 8
_MEMORY_S = 20.0
"""Over about so many seconds throughput is measured."""


class Throughput:
    """Prompt tokens that leave the queue per second, the last seconds counting most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._last_s = 0.0
        self._num_tokens = 0.0  # those of long ago count little

    def add(self, report: StepReport) -> None:
        """Take in one step: an observer for `AsyncEngine.add_observer`."""
        if report.stats is not None and report.stats.num_prefix_queries:
            now_s = self._clock()
            if self._began_s is None:
                self._began_s = self._last_s = now_s
            self._num_tokens = self._num_tokens * math.exp((self._last_s - now_s) / _MEMORY_S)
            self._num_tokens += report.stats.num_prefix_queries
            self._last_s = now_s

    def seconds_for(self, num_tokens: int) -> float:
        """How long a queue of so many prompt tokens takes, within the bounds of `Retry-After`."""
        if self._began_s is None:
            return UNMEASURED_RETRY_S
        now_s = self._clock()
        remembered = self._num_tokens * math.exp((self._last_s - now_s) / _MEMORY_S)
        span_s = _MEMORY_S * -math.expm1((self._began_s - now_s) / _MEMORY_S)
        rate = remembered / max(span_s, 1.0)
        return min(max(num_tokens / max(rate, 1e-9), MIN_RETRY_S), MAX_RETRY_S)


class Place:
    """What one API request holds of the bounds."""

    def __init__(self, admission: Admission, num_requests: int, num_tokens: int) -> None:
        self._admission = admission
        self._num_requests = num_requests
        self._num_queued_tokens = 0
        admission.num_requests += num_requests
        self._set_tokens(num_tokens)

    def correct(self, num_tokens: int) -> None:
        """Its prompts are tokenised: they have so many tokens."""
        self._set_tokens(num_tokens)

    def begun(self, num_tokens: int) -> None:
        """A prompt of so many tokens waits no more: its output has begun."""
        self._set_tokens(max(0, self._num_queued_tokens - num_tokens))

    def release(self) -> None:
        """Its answer has ended."""
        self._set_tokens(0)
        self._admission.num_requests -= self._num_requests
        self._num_requests = 0

    def _set_tokens(self, num_tokens: int) -> None:
        self._admission.num_queued_tokens += num_tokens - self._num_queued_tokens
        self._num_queued_tokens = num_tokens


class Admission:
    """The bounds, and what is held of them. Event loop only."""

    def __init__(
        self, *, max_requests: int, max_queued_tokens: int, throughput: Throughput, too_many: bool = False
    ) -> None:
        """`max_requests`: that run and wait together. `too_many`: say 429 and not 503."""
        self.num_requests = 0
        """Requests to the engine (choices) that are open."""
        self.num_queued_tokens = 0
        """Prompt tokens of those whose output has not begun."""
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens
        self._throughput = throughput
        self._error = TooManyRequests if too_many else Overloaded

    @classmethod
    def of(cls, settings: Settings, info: ModelInfo, throughput: Throughput) -> Admission:
        """As the operator has it."""
        server = settings.server
        most = server.max_queued_tokens
        return cls(
            max_requests=settings.engine.scheduler.max_num_seqs + server.max_queued_requests,
            max_queued_tokens=_QUEUE_PER_CACHE * info.kv_cache_tokens if most is None else most,
            throughput=throughput,
            too_many=server.overload_status == "429",
        )

    def admit(self, request: Request, *, num_requests: int, num_bytes: int) -> Place:
        """A place for `num_requests` choices with a body of so many bytes. Raises Overloaded or TooManyRequests."""
        num_tokens = num_bytes // BYTES_PER_TOKEN
        if self.num_requests and self.num_requests + num_requests > self._max_requests:
            raise self._refusal("requests")
        if self.num_queued_tokens and self.num_queued_tokens + num_tokens > self._max_queued_tokens:
            raise self._refusal("prompt tokens")
        place = Place(self, num_requests, num_tokens)
        hold(request.scope, place)
        return place

    def _refusal(self, what: str) -> Exception:
        retry_after_s = self._throughput.seconds_for(self.num_queued_tokens)
        message = f"too many {what} wait already: try again in {math.ceil(retry_after_s)} s"
        return self._error(message, retry_after_s=retry_after_s)


class Held(Protocol):
    """What a request holds while it is answered. There are two: `Place`, and `ratelimits.Charge`."""

    def release(self) -> None:
        """Give it back. The second time is nothing."""


def hold(scope: Scope, held: Held) -> None:
    """Give `held` back when the answer to this request has ended."""
    scope["state"].setdefault("held", []).append(held)


def take_over(scope: Scope) -> Callable[[], None]:
    """A function that gives back what this request holds, which is then no more done when its answer has ended."""
    all_held: list[Held] = scope["state"].pop("held", [])

    def release() -> None:
        for held in all_held:
            held.release()

    return release


class ReleaseHeld:
    """ASGI middleware: gives back what a route has taken for its request, when the answer has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if scope["type"] == "http":
                take_over(scope)()
