"""Streams on the wire: what comes first, what comes between, how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest
import uvicorn
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message

from engine.errors import EngineDead, Overloaded
from server import sse
from server.sse import event_stream

pytestmark = pytest.mark.anyio

Item = str | Exception | asyncio.Event


@dataclass
class Source:
    """Events as a test writes them: texts, errors that are raised, and gates that are waited for."""

    items: list[Item]
    is_closed: bool = False

    async def events(self) -> AsyncGenerator[str, None]:
        try:
            for item in self.items:
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            self.is_closed = True


@dataclass
class Client:
    """The other end of one ASGI call."""

    sent: list[Message] = field(default_factory=list)
    wrote: asyncio.Condition = field(default_factory=asyncio.Condition)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    stopped_reading: bool = False
    """Every send waits for ever from now on."""

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.stopped_reading:
            await asyncio.Event().wait()
        async with self.wrote:
            self.sent.append(message)
            self.wrote.notify_all()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    async def wait_for_text(self, text: str) -> None:
        async with self.wrote:
            await self.wrote.wait_for(lambda: text in self.text)

    async def ask(self, source: Source) -> None:
        """Make the request and read the whole answer."""
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {"request_id": "req_1"}}
        response = await event_stream(Request(scope, self.receive), source.events())
        await response(scope, self.receive, self.send)


async def test_a_stream_on_the_wire() -> None:
    client, source = Client(), Source(['{"a":1}', '{"b":"é"}'])
    await client.ask(source)
    assert client.text == 'data: {"a":1}\n\ndata: {"b":"é"}\n\ndata: [DONE]\n\n'
    assert client.sent[0]["status"] == 200
    assert client.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert client.headers["cache-control"] == "no-cache"
    assert client.headers["x-accel-buffering"] == "no"
    assert client.sent[-1].get("more_body") is False
    assert source.is_closed


async def test_each_event_is_sent_when_it_comes() -> None:
    gate = asyncio.Event()
    client, source = Client(), Source(["1", gate, "2"])
    asking = asyncio.create_task(client.ask(source))
    await client.wait_for_text("data: 1\n\n")
    assert "data: 2" not in client.text
    gate.set()
    await asking


async def test_an_error_before_the_first_event_is_raised_and_nothing_is_sent() -> None:
    client, source = Client(), Source([Overloaded("too many", retry_after_s=1)])
    with pytest.raises(Overloaded):
        await client.ask(source)
    assert client.sent == []
    assert source.is_closed


async def test_an_error_after_it_is_an_event_and_the_stream_ends() -> None:
    client, source = Client(), Source(["1", EngineDead("it broke")])
    await client.ask(source)
    _, error, done, _ = client.text.split("\n\n")
    envelope = {"message": "it broke", "type": "server_error", "param": None, "code": "engine_dead"}
    assert json.loads(error.removeprefix("data: ")) == {"error": envelope}
    assert done == "data: [DONE]"
    assert client.sent[-1].get("more_body") is False


async def test_an_unforeseen_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    await client.ask(Source(["1", ValueError("a secret")]))
    assert "internal_error" in client.text
    assert "req_1" in client.text
    assert "a secret" not in client.text
    assert "a secret" in caplog.text


async def test_a_long_wait_gets_headers_then_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    gate = asyncio.Event()
    client, source = Client(), Source([gate, "1"])
    asking = asyncio.create_task(client.ask(source))
    await client.wait_for_text(": keep-alive\n\n: keep-alive\n\n")
    assert client.sent[0]["status"] == 200
    gate.set()
    await asking
    lines = client.text.split("\n\n")
    assert set(lines[:-3]) == {": keep-alive"}
    assert lines[-3:] == ["data: 1", "data: [DONE]", ""]


async def test_an_error_after_a_long_wait_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    gate = asyncio.Event()
    client, source = Client(), Source([gate, EngineDead("it broke")])
    asking = asyncio.create_task(client.ask(source))
    await client.wait_for_text(": keep-alive")
    gate.set()
    await asking
    assert '"engine_dead"' in client.text
    assert client.text.endswith("data: [DONE]\n\n")


async def test_a_client_that_leaves_before_the_first_event_closes_the_source() -> None:
    client, source = Client(), Source([asyncio.Event()])
    asyncio.get_running_loop().call_soon(client.gone.set)
    with pytest.raises(ClientDisconnect):
        await client.ask(source)
    assert source.is_closed
    assert client.sent == []


async def test_a_client_that_leaves_during_a_long_wait_closes_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    client, source = Client(), Source([asyncio.Event()])
    asking = asyncio.create_task(client.ask(source))
    await client.wait_for_text(": keep-alive")
    client.gone.set()
    await asking
    assert source.is_closed


async def test_a_client_that_leaves_between_events_closes_the_source() -> None:
    client, source = Client(), Source(["1", asyncio.Event()])
    asking = asyncio.create_task(client.ask(source))
    await client.wait_for_text("data: 1")
    client.gone.set()
    await asking
    assert source.is_closed
    assert "[DONE]" not in client.text


async def test_a_client_that_stops_reading_and_leaves_closes_the_source() -> None:
    gate = asyncio.Event()
    client, source = Client(), Source(["1", gate, "2", "3"])
    asking = asyncio.create_task(client.ask(source))
    await client.wait_for_text("data: 1")
    client.stopped_reading = True
    gate.set()
    await asyncio.sleep(0)
    client.gone.set()
    await asking
    assert source.is_closed


async def test_being_cancelled_closes_the_source() -> None:
    client, source = Client(), Source(["1", asyncio.Event()])
    asking = asyncio.create_task(client.ask(source))
    await client.wait_for_text("data: 1")
    asking.cancel()
    await asyncio.wait({asking})
    assert source.is_closed


def test_sigterm_leaves_streams_to_uvicorn() -> None:
    """sse-starlette would end them all within half a second."""
    server = uvicorn.Server(uvicorn.Config(lambda: None))
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit
    assert not sse.AppStatus.should_exit
    assert not sse.AppStatus.enable_automatic_graceful_drain
