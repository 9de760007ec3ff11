"""The application behind uvicorn on a real socket: what happens while a stream runs, and when a client leaves.

The server runs on the test's own event loop, so that a test can hold the engine at any point.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from engine.errors import EngineError
from tests.factories_engine import Call, FakeEngine, Script, say
from tests.factories_http import make_app

pytestmark = pytest.mark.anyio

STREAM = {"prompt": "hi", "stream": True}

SOON_S = 2.0
"""A client that has left must be noticed within this."""


@dataclass
class Daemon:
    """A running server."""

    engine: FakeEngine
    port: int

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=10) as client:
            yield client

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


Serve = Callable[..., Awaitable[Daemon]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server for a script or an engine; it is stopped after the test."""
    running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def start(script: Script | Callable[[Call], Script] | None = None, **server: Any) -> Daemon:
        engine = FakeEngine(script, max_model_len=1000)
        sock = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(make_app(engine, **server), log_config=None, timeout_graceful_shutdown=1)
        uvicorn_server = uvicorn.Server(config)
        running.append((uvicorn_server, asyncio.create_task(uvicorn_server.serve([sock]))))
        return Daemon(engine, sock.getsockname()[1])

    yield start
    for uvicorn_server, task in running:
        uvicorn_server.should_exit = True
        await task


def post(path: str, **body: Any) -> bytes:
    """A raw request."""
    content = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(content), content)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, not FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def all_ended(calls: list[Call]) -> None:
    async with asyncio.timeout(SOON_S):
        for call in calls:
            await call.ended.wait()


async def test_each_event_arrives_as_it_comes(serve: Serve) -> None:
    gate = asyncio.Event()
    daemon = await serve(say("a", gate, "b"))
    async with daemon.client() as client, client.stream("POST", "/v1/completions", json=STREAM) as response:
        lines = response.aiter_lines()
        assert '"text":"a"' in await anext(lines)
        gate.set()
        rest = [line async for line in lines if line]
    assert '"text":"b"' in rest[0]
    assert rest[-1] == "data: [DONE]"


async def test_an_error_after_the_first_byte_ends_the_stream(serve: Serve) -> None:
    daemon = await serve(say("a", EngineError("it broke")))
    async with daemon.client() as client:
        text = (await client.post("/v1/completions", json=STREAM)).text
    assert [line[:13] for line in text.split("\n\n")] == ['data: {"id":"', 'data: {"error', "data: [DONE]", ""]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
@pytest.mark.parametrize("leave", [asyncio.StreamWriter.close, reset], ids=["FIN", "RST"])
@pytest.mark.parametrize("said", [(), ("a",)], ids=["before the first token", "after it"])
async def test_18_a_client_that_leaves_frees_its_place(
    serve: Serve, said: tuple[str, ...], leave: Callable[[asyncio.StreamWriter], None], stream: bool, n: int
) -> None:
    daemon = await serve(say(*said, asyncio.Event()))
    reader, writer = await daemon.connect()
    writer.write(post("/v1/completions", prompt="hi", stream=stream, n=n))
    calls = await daemon.engine.wait_for_calls(n)
    if said and stream:
        assert b"200 OK" in await reader.readuntil(b'"text":"a"')
    assert not any(call.ended.is_set() for call in calls)
    leave(writer)
    await all_ended(calls)
    assert all(call.was_aborted for call in calls)


async def test_18_clients_that_leave_at_once_do_not_disturb_one_that_stays(serve: Serve) -> None:
    gate = asyncio.Event()
    daemon = await serve(say("a", gate, "b"))
    reader, writer = await daemon.connect()
    writer.write(post("/v1/completions", prompt="stays", stream=True))
    leaving = [(await daemon.connect())[1] for _ in range(30)]
    for index, each in enumerate(leaving):
        each.write(post("/v1/completions", prompt="leaves", stream=index % 2 == 0))
    calls = await daemon.engine.wait_for_calls(31)
    for index, each in enumerate(leaving):
        (each.close if index % 3 else each.transport.abort)()
    await all_ended([call for call in calls if call.prompt.endswith("leaves")])
    gate.set()
    assert b'"text":"b"' in await reader.readuntil(b"[DONE]")
    writer.close()
    assert sorted(call.was_aborted for call in calls) == [False] + [True] * 30


async def test_a_client_may_ask_again_on_the_same_connection(serve: Serve) -> None:
    daemon = await serve()
    async with daemon.client() as client:
        for body in (STREAM, {"prompt": "hi"}, {"prompt": 5}, STREAM):
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == (400 if body == {"prompt": 5} else 200)


async def test_a_refused_key_does_not_wait_for_the_body(serve: Serve) -> None:
    daemon = await serve(api_key=("k",))
    reader, writer = await daemon.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")  # and nothing more
    async with asyncio.timeout(SOON_S):
        assert b"401 Unauthorized" in await reader.readuntil(b"\r\n")
    writer.close()


async def test_a_body_that_says_it_is_too_long_is_not_waited_for(serve: Serve) -> None:
    daemon = await serve()
    reader, writer = await daemon.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
    async with asyncio.timeout(SOON_S):
        assert b"413" in await reader.readuntil(b"\r\n")
    writer.close()


async def test_a_client_that_leaves_in_its_body_is_forgotten(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    daemon = await serve()
    _, writer = await daemon.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    writer.close()
    async with daemon.client() as client:
        assert (await client.get("/health")).status_code == 200
    assert daemon.engine.calls == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("path", ["/v1/models/fake/model", "/v1/models/fake%2Fmodel"])
async def test_a_models_id_may_have_slashes(serve: Serve, path: str) -> None:
    daemon = await serve()
    async with daemon.client() as client:
        assert (await client.get(path)).json()["id"] == "fake/model"
