"""Metrics: what the rest of the server tells, and what a scrape reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from engine.core import ModelInfo
from engine.messages import EngineStats, StepReport
from server.metrics.own import chairlift_families
from server.metrics.tally import Tally
from server.metrics.vllm import vllm_families

_LAG_INTERVAL_S = 0.1
_MAX_REJECTION_REASONS = 64


class EngineView(Protocol):
    """What a scrape reads of the engine; both are references, so nobody waits."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""

    @property
    def stats(self) -> EngineStats:
        """The state now."""


class Metrics:
    """All metrics of one server, with a registry of its own. The event loop's thread only.

    Counters and histograms grow by `on_report`, once per step. Gauges are read from `engine.stats` when scraped, so
    they are right while idle too.
    """

    def __init__(
        self,
        engine: EngineView,
        *,
        vllm_names: bool = True,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`vllm_names`: publish the `vllm:*` names too. `prefix_caching`: whether the engine does it."""
        self._engine = engine
        self._vllm_names = vllm_names
        self._prefix_caching = prefix_caching
        self._clock = clock
        self._start_s = clock()
        self._tally = Tally(engine.info.max_model_len)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def on_report(self, report: StepReport) -> None:
        """Take in one step: an observer for `AsyncEngine.add_observer`."""
        self._tally.add(report)

    def rejected(self, reason: str) -> None:
        """A request was refused. `reason` is an error code of ours, never a client's text."""
        known = self._tally.rejected
        known[reason if reason in known or len(known) < _MAX_REJECTION_REASONS else "other"] += 1

    def rate_limited(self, limit: str) -> None:
        """A rate limit refused a request: `ratelimits.Refusal`."""
        self._tally.rate_limited[limit] += 1

    def responded(self, route: str, status: int) -> None:
        """A response began. `route` is a route's template (`/v1/models/{id}`), never the path that was asked for."""
        self._tally.responses[route, str(status)] += 1

    async def watch_event_loop(self, interval_s: float = _LAG_INTERVAL_S) -> None:
        """Measure how late the event loop is, ten times a second, until cancelled."""
        while True:
            due_s = self._clock() + interval_s
            await asyncio.sleep(interval_s)
            self._tally.event_loop_lag_s.observe((max(0.0, self._clock() - due_s),))

    def collect(self) -> Iterator[Metric]:
        """Every family now (the registry calls this for a scrape)."""
        info, stats = self._engine.info, self._engine.stats
        yield from chairlift_families(info, self._tally, stats, self._clock(), self._start_s)
        if self._vllm_names:
            yield from vllm_families(info, self._tally, stats, prefix_caching=self._prefix_caching)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """A scrape's body and content type: OpenMetrics if `accept` asks for it, else Prometheus text."""
        if "application/openmetrics-text" in accept:
            text: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4
