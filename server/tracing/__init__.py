"""Traces: a span for each request that generates, sent by OTLP over HTTP (`--otlp-traces-endpoint`, the extra `otel`).

    requestlog.LogRequests --Ended--> middleware.TraceRequests --> spans.Trace --> attributes
                                                                       |
                                          export.Tracing: SDK, queue, thread --OTLP--> collector

A span says what the request's log line does and is made of the same record. Nothing of OpenTelemetry's SDK is imported
without the setting: this file and `middleware` know of it by name only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from server.tracing.export import Tracing


def open_tracing(endpoint: str | None) -> Tracing | None:
    """Traces for this URL, or none. Raises ConfigError when what sends them is not installed."""
    if endpoint is None:
        return None
    try:
        from server.tracing.export import Tracing
    except ImportError as error:
        raise ConfigError(
            "traces are sent with OpenTelemetry, which is not installed",
            setting="otlp_traces_endpoint",
            hint="pip install opentelemetry-exporter-otlp-proto-http, or chairlift with its extra: "
            "pip install '.[otel]'",
        ) from error
    return Tracing.to(endpoint)
