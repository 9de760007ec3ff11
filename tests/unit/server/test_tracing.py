"""Which requests have a span, what is in it, whose trace it goes on with; and what happens when none can be sent."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.datastructures import Headers

from engine.errors import ConfigError, DeadlineExceeded, EngineDead
from server import tracing as tracing_package
from server.tracing import open_tracing
from server.tracing.export import Reporting, Tracing
from server.tracing.spans import context_of
from tests.factories_engine import FakeEngine, Script, say
from tests.factories_http import delete_at_end, make_client
from tests.factories_otlp import CLIENT, PARENT_ID, TRACE_ID

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    return Tracing(SimpleSpanProcessor(exporter))


async def post(tracing: Tracing, path: str, body: object, script: Script | None = None, **more: Any) -> None:
    """Make one request."""
    headers = more.pop("headers", {})
    async with make_client(FakeEngine(script), tracing=tracing, **more) as client:
        await client.post(path, json=body, headers=headers)


def sent(exporter: InMemorySpanExporter) -> ReadableSpan:
    """The one span."""
    [span] = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_each_request_that_generates_has_one(
    tracing: Tracing, exporter: InMemorySpanExporter, path: str, stream: bool
) -> None:
    await post(tracing, path, PATHS[path] | {"stream": stream}, say("ab", "c", queue_s=0.25))
    span = sent(exporter)
    told = dict(span.attributes or {})
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert span.name == f"{told['gen_ai.operation.name']} fake/model"
    assert told["gen_ai.operation.name"] == ("text_completion" if path == "/v1/completions" else "chat")
    assert told["http.route"] == path
    assert told.get("gen_ai.request.stream", False) is stream
    assert ("gen_ai.response.time_to_first_chunk" in told) is stream
    assert told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["gen_ai.latency.time_in_queue"] == 0.25
    assert span.status.status_code is StatusCode.UNSET


async def test_what_was_asked_for(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    asked = {"n": 2, "max_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 7}
    asked |= {"presence_penalty": 1, "frequency_penalty": -1}
    await post(tracing, "/v1/completions", {"prompt": ["a", "b"], **asked}, say("x"))
    told = dict(sent(exporter).attributes or {})
    assert told["gen_ai.request.choice.count"] == 2
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
    assert {name: told[f"gen_ai.request.{name}"] for name in names} == {k: v for k, v in asked.items() if k != "n"}
    assert isinstance(told["gen_ai.request.temperature"], float)
    assert told["gen_ai.response.finish_reasons"] == ("stop",) * 4


async def test_others_have_none(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    async with make_client(tracing=tracing) as client:
        for path in ("/v1/models", "/health", "/metrics", "/v1/chat/completions", "/v1/responses/resp_x"):
            await client.get(path)
        await client.post("/v1/tokenize", json={"prompt": "hi"})
    assert exporter.get_finished_spans() == ()


async def test_no_text_of_anybodys_is_in_it(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    script = say("hush", "hush")
    bodies = [
        {"prompt": "hush", "stop": ["hush!"]},
        {"prompt": "hush", "temperature": "hush"},
        {"prompt": "x", "model": "hush"},
        {"prompt": "x", "hush": 1},
    ]
    for body in bodies:
        headers = {"Authorization": "Bearer hush"}
        await post(tracing, "/v1/completions?key=hush", body, script, headers=headers)
    await post(tracing, "/v1/responses", {"input": "hush", "instructions": "hush"}, script)
    spans = exporter.get_finished_spans()
    assert len(spans) == 5
    assert "hush" not in "".join(span.to_json() for span in spans)


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (say(DeadlineExceeded("late")), 504, "deadline_exceeded"),
        (say(RuntimeError("nobody foresaw this")), 500, "internal_error"),
        (say("a", RuntimeError("nor this")), 500, "internal_error"),
    ],
)
async def test_failures_are_errors(
    tracing: Tracing, exporter: InMemorySpanExporter, script: Script, status: int, code: str
) -> None:
    await post(tracing, "/v1/chat/completions", CHAT, script)
    span = sent(exporter)
    told = dict(span.attributes or {})
    assert (told["http.response.status_code"], told["error.type"]) == (status, code)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)


@pytest.mark.parametrize("path", PATHS)
async def test_failures_within_a_stream_are_errors_too(
    tracing: Tracing, exporter: InMemorySpanExporter, path: str
) -> None:
    await post(tracing, path, PATHS[path] | {"stream": True}, say("a", EngineDead("it broke")))
    span = sent(exporter)
    told = dict(span.attributes or {})
    assert (told["http.response.status_code"], told["error.type"]) == (200, "engine_dead")
    assert span.status.status_code is StatusCode.ERROR


async def test_refusals_are_the_clients_errors(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    await post(tracing, "/v1/chat/completions", CHAT, api_key=("k",))
    await post(tracing, "/v1/chat/completions", CHAT | {"temperature": -1})
    spans = exporter.get_finished_spans()
    told = [dict(span.attributes or {}) for span in spans]
    seen = [(each["http.response.status_code"], each["error.type"]) for each in told]
    assert seen == [(401, "invalid_api_key"), (400, "invalid_value")]
    assert all(span.status.status_code is StatusCode.UNSET for span in spans)


async def test_one_in_the_background_has_its_own_below(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    gate = asyncio.Event()
    async with make_client(FakeEngine(say("ab", gate, "c")), tracing=tracing) as client:
        answer = await client.post("/v1/responses", json={"input": "hi", "background": True})
        gate.set()
        await delete_at_end(client, answer.json()["id"])
    request, response = exporter.get_finished_spans()
    assert (request.kind, response.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)
    assert response.parent == request.context
    assert "gen_ai.usage.output_tokens" not in dict(request.attributes or {})
    told = dict(response.attributes or {})
    assert (told["gen_ai.usage.output_tokens"], told["gen_ai.response.id"]) == (3, answer.json()["id"])
    assert "http.response.status_code" not in told


# --- whose trace


async def test_it_goes_on_with_the_clients_trace(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": CLIENT, "tracestate": "vendor=1,other=2"}
    await post(tracing, "/v1/completions", {"prompt": "hi"}, headers=headers)
    span = sent(exporter)
    assert span.context is not None
    assert span.parent is not None
    assert format(span.context.trace_id, "032x") == TRACE_ID
    assert (format(span.parent.span_id, "016x"), span.parent.is_remote) == (PARENT_ID, True)
    assert span.context.trace_state.to_header() == "vendor=1,other=2"


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "hello",
        CLIENT.upper(),
        CLIENT[:-1],
        CLIENT + "-more",  # version 00 has no more
        "ff" + CLIENT[2:],
        CLIENT.replace(TRACE_ID, "0" * 32),
        CLIENT.replace(PARENT_ID, "0" * 16),
        CLIENT.replace(TRACE_ID, TRACE_ID[:-1]),
        CLIENT.replace("-", "_"),
        "01" + CLIENT[2:] + "-" + "x" * 600,
        CLIENT[:-2] + "é1",
    ],
)
def test_a_malformed_one_is_as_none(traceparent: str) -> None:
    assert trace.get_current_span(context_of(headers(("traceparent", traceparent)))) is trace.INVALID_SPAN


def headers(*pairs: tuple[str, str]) -> Headers:
    return Headers(raw=[(name.encode(), value.encode("latin-1")) for name, value in pairs])


def test_two_are_as_none() -> None:
    context = context_of(headers(("traceparent", CLIENT), ("traceparent", CLIENT)))
    assert trace.get_current_span(context) is trace.INVALID_SPAN


@pytest.mark.parametrize(
    ("pairs", "state"),
    [
        ([("traceparent", CLIENT)], ""),
        ([("traceparent", "cc" + CLIENT[2:] + "-what.the-future.brings")], ""),
        ([("traceparent", CLIENT), ("tracestate", "a=1"), ("tracestate", "b=2")], "a=1,b=2"),
        ([("traceparent", CLIENT), ("tracestate", "no pairs at all")], ""),
        ([("traceparent", CLIENT), ("tracestate", "a=" + "1" * 10_000)], ""),
        ([("tracestate", "a=1"), ("traceparent", CLIENT)], "a=1"),
    ],
)
def test_a_state_that_is_malformed_goes_alone(pairs: list[tuple[str, str]], state: str) -> None:
    found = trace.get_current_span(context_of(headers(*pairs))).get_span_context()
    assert format(found.trace_id, "032x") == TRACE_ID
    assert found.trace_state.to_header() == state


async def test_what_its_client_does_not_sample_is_not_sent(
    tracing: Tracing, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server.requestlog")
    await post(tracing, "/v1/completions", {"prompt": "hi"}, headers={"traceparent": CLIENT[:-2] + "00"})
    assert exporter.get_finished_spans() == ()
    assert f", stop, trace {TRACE_ID}" in caplog.text


async def test_the_log_line_names_the_span(
    tracing: Tracing, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server.requestlog")
    gate = asyncio.Event()
    async with make_client(FakeEngine(say("a", gate, "b")), tracing=tracing) as client:
        answer = await client.post("/v1/responses", json={"input": "hi", "background": True})
        gate.set()
        await delete_at_end(client, answer.json()["id"])
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    lines = [each for each in fields if "trace_id" in each]
    assert [line.get("response") for line in lines] == [None, answer.json()["id"]]
    context = exporter.get_finished_spans()[0].context
    assert context is not None
    ids = {"trace_id": format(context.trace_id, "032x"), "span_id": format(context.span_id, "016x")}
    assert all(ids.items() <= line.items() for line in lines)


# --- what OpenTelemetry's own variables say


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "chairlift"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours,team=x"}, "ours"),
    ],
)
async def test_the_service_has_the_name_it_is_given(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for variable in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    await post(Tracing(SimpleSpanProcessor(exporter)), "/v1/completions", {"prompt": "hi"})
    resource = sent(exporter).resource.attributes
    assert resource["service.name"] == name
    assert resource.get("team") == ("x" if "OTEL_RESOURCE_ATTRIBUTES" in variables else None)


async def test_switched_off_it_does_nothing(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server.requestlog")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    await post(Tracing(SimpleSpanProcessor(exporter)), "/v1/completions", {"prompt": "hi"})
    assert exporter.get_finished_spans() == ()
    assert "POST /v1/completions 200" in caplog.text
    assert "trace" not in caplog.text


async def test_nothing_else_makes_spans(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI would, with whatever is the process's own provider; its spans have query strings."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    async with make_client() as client:
        await client.post("/v1/completions?key=hush", json={"prompt": "hi"})
    assert exporter.get_finished_spans() == ()


# --- without the setting, without the package


@pytest.mark.slow  # it imports torch
def test_without_the_setting_nothing_is_imported() -> None:
    assert open_tracing(None) is None
    program = (
        "import sys, server.app, server.daemon, server.commands.serve, server.tracing\n"
        "server.tracing.open_tracing(None)\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "server.tracing.export")
    monkeypatch.delattr(tracing_package, "export")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_tracing("http://localhost:4318/v1/traces")
    assert caught.value.setting == "otlp_traces_endpoint"
    assert "pip install '.[otel]'" in str(caught.value.hint)


# --- when they cannot be sent


class Collector(SpanExporter):
    """Takes spans if it is `well`; else it says why not, as the SDK's exporter does."""

    def __init__(self) -> None:
        self.well = False
        self.was_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.well:
            return SpanExportResult.SUCCESS
        logging.getLogger("opentelemetry.trace.propagation.tracecontext").warning("a client's header is too long")
        sdk_log = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        sdk_log.warning("Transient error: refused")
        sdk_log.error("Failed to export")
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.was_shut_down = True


def test_an_outage_costs_a_line_a_minute(exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = [1000.0]
    collector = Collector()
    reporting = Reporting(collector, "collector:4318", clock=lambda: clock[0])
    provider = TracerProvider(shutdown_on_exit=False)
    span = provider.get_tracer("x").start_span("x")
    for _ in range(100):
        reporting.export([span, span])  # type: ignore[list-item]
        clock[0] += 1
    collector.well = True
    reporting.export([span])  # type: ignore[list-item]
    reporting.export([span])  # type: ignore[list-item]
    assert [record.getMessage() for record in caplog.records] == [
        "traces do not reach collector:4318, 2 spans are lost: Transient error: refused",
        "traces do not reach collector:4318, 122 spans are lost: Transient error: refused",
        "traces reach collector:4318 again; 200 spans were lost",
    ]
    reporting.shutdown()
    assert collector.was_shut_down
    logging.getLogger("opentelemetry.x").warning("shown again")
    assert "shown again" in caplog.text


async def test_the_end_waits_no_longer_than_it_says(caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()

    class Stuck(SpanProcessor):
        def shutdown(self) -> None:
            released.wait()

    try:
        async with asyncio.timeout(10):
            await Tracing(Stuck()).close(timeout_s=0.01)
    finally:
        released.set()
    assert "could not be sent within 0.01 s" in caplog.text


async def test_the_end_sends_what_is_left() -> None:
    ended: list[str] = []

    class Slow(SpanProcessor):
        def shutdown(self) -> None:
            ended.append(threading.current_thread().name)

    await Tracing(Slow()).close()
    assert ended == ["close-tracing"]
