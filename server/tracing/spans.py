"""The span of one request: where its client's trace goes on, and what becomes of a record of `requestlog`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from server.tracing.attributes import at_end, at_start

if TYPE_CHECKING:
    from server.requestlog import Ended

_PROPAGATOR = TraceContextTextMapPropagator()


def context_of(headers: Headers) -> Context:
    """The client's trace, by W3C Trace Context; an empty one if it sends none, or one that is malformed."""
    carrier = {name: headers.getlist(name) for name in ("traceparent", "tracestate")}
    if len(carrier["traceparent"]) != 1:  # more than one is malformed as well
        return Context()
    return _PROPAGATOR.extract(carrier, Context())


class Trace:
    """The span of one request, and of what it leaves to the background. See `requestlog.Trace`."""

    def __init__(self, tracer: Tracer, scope: Scope, operation: str, model: str) -> None:
        self._tracer = tracer
        self._model = model
        self._name = f"{operation} {model}"
        self._start_ns = time.time_ns()
        self._began_s = time.monotonic()
        attributes = at_start(
            operation, path=scope["path"], scheme=scope["scheme"], request_id=scope["state"]["request_id"]
        )
        self._span = tracer.start_span(
            self._name,
            context_of(Headers(scope=scope)),
            SpanKind.SERVER,
            attributes,
            start_time=self._start_ns,
        )
        context = self._span.get_span_context()
        self.ids: Mapping[str, str] = (
            {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}
            if context.is_valid  # it is not if OTEL_SDK_DISABLED says so
            else {}
        )

    def end(self, ended: Ended) -> None:
        """End the request's span: what is sampled goes to the queue of those that are to be sent."""
        self._finish(self._span, ended)

    def add_background(self, ended: Ended) -> None:
        """Make a span, below the request's, of the response that it has left to the background."""
        span = self._tracer.start_span(
            f"{self._name} in the background",
            set_span_in_context(self._span, Context()),
            SpanKind.INTERNAL,
            start_time=self._ns(ended.began_s),
        )
        self._finish(span, ended)

    def _finish(self, span: Span, ended: Ended) -> None:
        if span.is_recording():
            span.set_attributes(at_end(ended, self._model))
            if ended.failure is not None and ended.failure.status >= 500:  # below, it is the client's
                span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(ended.ended_s))

    def _ns(self, moment_s: float) -> int:
        """A moment of the monotonic clock as a span has it: no length depends on jumps of the wall clock."""
        return self._start_ns + round((moment_s - self._began_s) * 1e9)
