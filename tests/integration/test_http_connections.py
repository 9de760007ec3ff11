"""Clients that hold connections and do not ask: over real sockets."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator

import pytest

from config.schema import ServerConfig
from server.connections import connection_class
from tests.factories_engine import say
from tests.factories_sockets import BODY, GET, POST, SOON_S, Serve, ask, closed, socket_servers

pytestmark = pytest.mark.anyio

SHORT_S = 0.2


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with socket_servers() as start:
        yield start


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send a byte now and then, as slowloris does."""
    for byte in data * 1000:
        if writer.is_closing():
            return
        writer.write(bytes([byte]))
        await asyncio.sleep(SHORT_S / 5)


@pytest.mark.parametrize(
    "start",
    [b"", b"GET /v1/models HTTP/1.1\r\n", b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: ", b"\r\n"],
    ids=["nothing", "a line", "half a header", "a blank line"],
)
@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second request"])
async def test_a_slow_head_is_cut_off(serve: Serve, before: bytes, start: bytes) -> None:
    connect = await serve(header_timeout_s=SHORT_S, keep_alive_s=1)
    streams = await connect()
    if before:
        assert b"200 OK" in await ask(streams, before)
    streams[1].write(start)
    dripping = asyncio.create_task(drip(streams[1], b"\r\n" if start == b"\r\n" else b"a")) if start else None
    assert await closed(streams[0]) == b""
    if dripping is not None:
        dripping.cancel()


async def test_one_that_comes_in_time_is_answered_however_long_that_takes(serve: Serve) -> None:
    gate = asyncio.Event()
    connect = await serve(say("a", gate, "b"), header_timeout_s=SHORT_S)
    streams = await connect()
    asking = asyncio.create_task(ask(streams, POST % len(BODY) + BODY))
    await asyncio.wait({asking}, timeout=3 * SHORT_S)
    assert not asking.done()
    gate.set()
    assert b"200 OK" in await asking
    assert b"200 OK" in await ask(streams)


async def test_a_slow_body_is_answered_with_408_and_closed(serve: Serve) -> None:
    connect = await serve(body_timeout=1)
    streams = await connect()
    streams[1].write(POST % 5000)
    dripping = asyncio.create_task(drip(streams[1], b" "))
    answer = await closed(streams[0])
    dripping.cancel()
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert b"connection: close" in answer
    assert b'"code":"request_timeout"' in answer


async def test_the_rest_of_a_refused_body_is_not_waited_for(serve: Serve) -> None:
    connect = await serve(header_timeout_s=SHORT_S, api_key=("k",))
    streams = await connect()
    assert b" 401 " in await ask(streams, POST % 5000)
    dripping = asyncio.create_task(drip(streams[1], b" "))
    assert await closed(streams[0]) == b""
    dripping.cancel()


async def test_with_one_too_many_the_longest_idle_goes(serve: Serve) -> None:
    connect = await serve(max_connections=3)
    first, second, third = [await connect() for _ in range(3)]
    for streams in (second, third, first):  # each is idle since its answer
        assert b"200 OK" in await ask(streams)
    newest = await connect()
    assert b"200 OK" in await ask(newest)
    assert await closed(second[0]) == b""
    for streams in (first, third, newest):
        assert b"200 OK" in await ask(streams)


async def test_half_heads_cannot_keep_others_out(serve: Serve) -> None:
    connect = await serve(max_connections=3)
    for _ in range(10):
        (await connect())[1].write(b"GET / HTTP/1.1\r\nX: ")
    assert b"200 OK" in await ask(await connect())


async def test_nobody_who_is_being_answered_is_sent_away(serve: Serve) -> None:
    gate = asyncio.Event()
    connect = await serve(say("a", gate, "b"), max_connections=2)
    busy = [await connect() for _ in range(2)]
    for _, writer in busy:
        writer.write(POST % 32 + b'{"prompt": "hi", "stream": true}')
    for reader, _ in busy:
        async with asyncio.timeout(SOON_S):
            await reader.readuntil(b'"text":"a"')
    refused = await closed((await connect())[0])
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b'"code": "overloaded"' in refused
    gate.set()
    for reader, _ in busy:
        async with asyncio.timeout(SOON_S):
            await reader.readuntil(b"[DONE]")
    assert b"200 OK" in await ask(await connect())


async def test_pipelined_requests_are_answered_one_after_another(serve: Serve) -> None:
    connect = await serve(header_timeout_s=SHORT_S, max_connections=1)
    streams = await connect()
    assert b"200 OK" in await ask(streams, GET + GET)
    assert b"200 OK" in await ask(streams, b"")


def test_by_default_it_is_what_the_limit_of_open_files_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 896), (100, 1), (10**6, 8192), (resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connection_class(ServerConfig()).max_connections == most
