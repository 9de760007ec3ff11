"""Sends spans to a collector, from a thread of the SDK's: neither requests nor the event loop ever wait for it.

Sampling, headers, certificates, batches and the service's name are as OpenTelemetry's environment variables have them,
which the SDK reads itself (by default: every trace that its client samples, or that begins here; `service.name`
chairlift). The SDK is used without its globals, so nothing else in the process makes spans, and it stays silent:
an outage would have it say several lines a batch, where `Reporting` says one a minute.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from starlette.types import Scope

from server import __version__
from server.tracing.spans import Trace

CLOSE_S = 3.0
"""How long the end of the process waits for the last spans to be sent. What is not sent by then is lost."""
_TELL_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class Tracing:
    """Makes traces of requests, and sends them. Event loop only."""

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor` is given every span that has ended, and is shut down by `close`."""
        resource = Resource.create().merge(Resource({"service.name": "chairlift", "service.version": __version__}))
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()),  # last, since what comes last counts
            shutdown_on_exit=False,  # which may take half a minute
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("chairlift", __version__)

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Send to this URL. Of the environment's variables that are wrong the SDK tells in the log, now."""
        exporter = OTLPSpanExporter(endpoint)
        processor = BatchSpanProcessor(Reporting(exporter, urlsplit(endpoint).netloc.rpartition("@")[2]))
        return cls(processor)

    def begin(self, scope: Scope, operation: str, model: str) -> Trace:
        """The trace of a request, which begins now."""
        return Trace(self._tracer, scope, operation, model)

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left, as far as that can be done by then."""
        # Its own thread and not a pooled one: those are waited for at the end of the process, however long they take.
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracing", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, timeout_s)
        if closing.is_alive():
            logger.warning("the last traces could not be sent within %g s", timeout_s)


class Reporting(SpanExporter):
    """Sends by another exporter, and says in its place when spans are lost. Called in the SDK's thread only.

    Until it is shut down the SDK's own log lines are read, not shown: one of them is why spans are lost, and others a
    client could cause (a `traceparent` that is too long).
    """

    def __init__(self, exporter: SpanExporter, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`where` is what the log calls the collector."""
        self._exporter = exporter
        self._where = where
        self._clock = clock
        self._num_lost = 0
        self._told_s = -math.inf
        self._sdk_log = _SdkLog()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch, in as many tries as the SDK sees fit."""
        self._sdk_log.reason = ""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                logger.info("traces reach %s again; %d spans were lost", self._where, self._num_lost)
            self._num_lost = 0
            return result
        self._num_lost += len(spans)
        if self._clock() - self._told_s >= _TELL_EVERY_S:
            self._told_s = self._clock()
            reason = self._sdk_log.reason or "the reason is not known"
            logger.warning("traces do not reach %s, %d spans are lost: %s", self._where, self._num_lost, reason)
        return result

    def shutdown(self) -> None:
        """Send no more."""
        self._exporter.shutdown()
        self._sdk_log.close()


class _SdkLog(logging.Handler):
    """Takes all that the SDK logs, from its making until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        """The first thing that an exporter has said since this was last emptied."""
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("opentelemetry.exporter"):
            self.reason = self.reason or record.getMessage()

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()
