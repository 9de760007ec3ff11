"""A collector that speaks OTLP over HTTP: what it is sent it decodes and keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""A `traceparent`: the client has begun a trace, and samples it."""
TRACE_ID, PARENT_ID = CLIENT.split("-")[1:3]

SERVER = Span.SpanKind.SPAN_KIND_SERVER
INTERNAL = Span.SpanKind.SPAN_KIND_INTERNAL
ERROR = Status.StatusCode.STATUS_CODE_ERROR
UNSET = Status.StatusCode.STATUS_CODE_UNSET


@dataclass(frozen=True)
class Received:
    """A span, as it came."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    status: int
    duration_s: float
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """Listens at `url`."""

    url: str = ""
    status: int = 200
    """What it answers."""
    spans: list[Received] = field(default_factory=list)
    num_batches: int = 0

    def take(self, body: bytes) -> None:
        self.num_batches += 1
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _plain(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [_received(span, resource) for span in of_scope.spans]


def _received(span: Span, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        status=span.status.code,
        duration_s=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        attributes=_plain(span.attributes),
        resource=resource,
    )


def _plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, str(kind))


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector at a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if collector.status == 200:
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                collector.take(body)
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
