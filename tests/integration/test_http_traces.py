"""Spans as a collector gets them, of requests to the application behind a real socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from engine.errors import EngineError
from engine.request import FinishReason
from server.tracing.export import Tracing
from tests.factories_engine import FakeEngine, Script, say
from tests.factories_http import make_app
from tests.factories_otlp import CLIENT, ERROR, PARENT_ID, SERVER, TRACE_ID, UNSET, Collector, collecting

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as started:
        yield started


async def traced(
    url: str, script: Script, use: Callable[[httpx.AsyncClient, FakeEngine], Awaitable[None]], **settings: Any
) -> None:
    """Serve the script, with its requests traced to `url`, while `use` runs."""
    engine = FakeEngine(script)
    tracing = Tracing.to(url)
    sock = socket.create_server(("127.0.0.1", 0))
    app = make_app(engine, tracing=tracing, **settings)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve([sock]))
    try:
        base_url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base_url, timeout=10, headers={"traceparent": CLIENT}) as client:
            await use(client, engine)
    finally:
        server.should_exit = True
        await serving
        await tracing.close()


async def test_a_stream(collector: Collector) -> None:
    async def use(client: httpx.AsyncClient, _: FakeEngine) -> None:
        body = CHAT | {"stream": True, "max_tokens": 7, "temperature": 0.5, "top_k": 10**30, "seed": 2**64 - 1}
        text = (await client.post("/v1/chat/completions", json=body)).text
        assert text.endswith("[DONE]\n\n")

    script = say("ab", "c", finish=FinishReason.LENGTH, num_cached=2, queue_s=0.0)
    await traced(collector.url, script, use)
    [span] = collector.spans
    assert (span.name, span.kind, span.status) == ("chat fake/model", SERVER, UNSET)
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
    assert span.resource["service.name"] == "chairlift"
    told = span.attributes
    waits = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_to_first_token", "e2e")
    times = {name: told.pop(f"gen_ai.latency.{name}") for name in waits}
    assert times["e2e"] <= span.duration_s
    assert 0 == times["time_in_queue"] <= times["time_in_model_prefill"] <= times["time_to_first_token"] <= times["e2e"]
    assert 0 <= times["time_in_model_decode"] <= times["e2e"]
    assert told.pop("gen_ai.response.time_to_first_chunk") == times["time_to_first_token"]
    assert told.pop("gen_ai.request.id").startswith("req_")
    assert told.pop("gen_ai.response.id").startswith("chatcmpl-")
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "chairlift",
        "gen_ai.request.model": "fake/model",
        "gen_ai.response.model": "fake/model",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 2**63 - 1,
        "gen_ai.request.seed": -1,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
    }


@pytest.mark.parametrize(
    ("stream", "status"), [(False, 500), (True, 200)], ids=["before the first byte", "in the stream"]
)
async def test_a_failure(collector: Collector, stream: bool, status: int) -> None:
    async def use(client: httpx.AsyncClient, _: FakeEngine) -> None:
        response = await client.post("/v1/completions", json={"prompt": "hi", "stream": stream})
        assert response.status_code == status

    await traced(collector.url, say("a", EngineError("it broke")), use)
    [span] = collector.spans
    assert (span.name, span.status) == ("text_completion fake/model", ERROR)
    assert (span.attributes["error.type"], span.attributes["http.response.status_code"]) == ("engine_error", status)
    assert span.attributes["gen_ai.usage.output_tokens"] == 1
    assert "gen_ai.response.finish_reasons" not in span.attributes
    assert "chairlift.aborted" not in span.attributes


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
async def test_a_client_that_leaves(collector: Collector, stream: bool) -> None:
    async def use(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": "hi", "stream": stream}
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(client.post("/v1/completions", json=body))
            [call] = await engine.wait_for_calls(1)
            asking.cancel()
            await call.ended.wait()

    await traced(collector.url, say("a", asyncio.Event()), use)
    [span] = collector.spans
    assert (span.status, span.attributes["chairlift.aborted"]) == (UNSET, True)
    assert "error.type" not in span.attributes
    assert span.attributes["gen_ai.usage.input_tokens"] == 3


async def test_many_are_sent_together_and_none_is_lost(collector: Collector) -> None:
    async def use(client: httpx.AsyncClient, _: FakeEngine) -> None:
        await asyncio.gather(*[client.post("/v1/completions", json={"prompt": "hi"}) for _ in range(8)])

    await traced(collector.url, say("a"), use)
    assert len({span.span_id for span in collector.spans}) == 8
    assert collector.num_batches == 1


async def test_a_collector_that_refuses_costs_one_line(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    async def use(client: httpx.AsyncClient, _: FakeEngine) -> None:
        for _ in range(3):
            assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200

    collector.status = 404
    caplog.set_level(logging.INFO)
    await traced(collector.url, say("a"), use)
    [line] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert (line.name, line.levelname) == ("server.tracing.export", "WARNING")
    assert "3 spans are lost" in line.getMessage()
    assert "404" in line.getMessage()
