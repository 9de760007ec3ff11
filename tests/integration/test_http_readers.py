"""Clients that read slowly, or not at all: over real sockets, with buffers that are soon full."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.factories_engine import FakeEngine, say
from tests.factories_sockets import SOON_S, Serve, Server, socket_servers
from tests.factories_tls import make_certificates, trusting

pytestmark = pytest.mark.anyio

SHORT_S = 0.4
SLOW_S = 1.0
PIECE = "x" * 32768
PIECES = [PIECE] * 32  # a megabyte: more than all buffers take
Client = socket.socket
TCP_CLOSE = b"\x07"  # of a connection that we have not closed


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with socket_servers() as start:
        yield start


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def connect(server: Server, certificates: Path | None = None) -> Client:
    """A connection whose client takes little that it does not read. Blocks."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(SOON_S)
    client.connect(server.address)
    if certificates is not None:
        return trusting(certificates).wrap_socket(client, server_hostname="localhost")
    return client


def post(*headers: str, **body: Any) -> bytes:
    content = json.dumps({"prompt": "hi", **body}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + content


def is_reset(client: Client) -> bool:
    """Whether what can be read ends with a reset. Blocks."""
    with suppress(ConnectionResetError):  # Python's TLS takes it for the end
        while client.recv(65536):
            pass
    state = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state == TCP_CLOSE


async def logged(caplog: pytest.LogCaptureFixture, name: str) -> str:
    """The line of that logger, once it is there."""
    async with asyncio.timeout(SOON_S):
        while not (lines := [record.getMessage() for record in caplog.records if record.name == name]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    [line] = lines
    return line


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
async def test_a_reader_that_stops_is_cut_off(
    serve: Serve, caplog: pytest.LogCaptureFixture, certificates: Path, tls: bool, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    engine = FakeEngine(say(*PIECES, asyncio.Event(), "end") if stream else say(*PIECES))
    server = await serve(engine, write_timeout_s=SHORT_S, certificates=certificates if tls else None)
    client = await asyncio.to_thread(connect, server, certificates if tls else None)
    with client:
        client.sendall(post(stream=stream))
        [call] = await engine.wait_for_calls(1)
        assert "it has taken nothing of its answer" in await logged(caplog, "server.connections")
        async with asyncio.timeout(SOON_S):
            await call.ended.wait()
        assert call.was_aborted == stream  # a whole answer had been said before it was written
        assert await asyncio.to_thread(is_reset, client)
    line = await logged(caplog, "server.requestlog")
    assert line.startswith("POST /v1/completions 200 in")
    assert ("(cut off)" in line) == stream


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
async def test_it_is_when_the_connection_is_being_closed(
    serve: Serve, caplog: pytest.LogCaptureFixture, certificates: Path, tls: bool
) -> None:
    """What is left is in the transport: no part of the application waits for it any more."""
    caplog.set_level(logging.INFO)
    server = await serve(say(*PIECES), write_timeout_s=SHORT_S, certificates=certificates if tls else None)
    with await asyncio.to_thread(connect, server, certificates if tls else None) as client:
        client.sendall(post("Connection: close"))
        assert "it has taken nothing of its answer" in await logged(caplog, "server.connections")
        assert await asyncio.to_thread(is_reset, client)


def read(client: Client, *, slowly: bool = False) -> bytes:
    """An answer. If slowly, this takes three times as long as a reader may stop. Blocks."""
    data = b""
    for _ in range(12 * slowly):
        time.sleep(SLOW_S / 4)
        for _ in range(8):
            data += client.recv(4096)
    while more := client.recv(65536):
        data += more
        if data.endswith((b"0\r\n\r\n", b"}}")):
            break
    return data


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
async def test_a_slow_reader_gets_it_all(
    serve: Serve, certificates: Path, monkeypatch: pytest.MonkeyPatch, tls: bool, stream: bool
) -> None:
    monkeypatch.setattr("asyncio.constants.SSL_SHUTDOWN_TIMEOUT", SHORT_S)
    engine = FakeEngine(say(*PIECES))
    server = await serve(engine, write_timeout_s=SLOW_S, certificates=certificates if tls else None)
    with await asyncio.to_thread(connect, server, certificates if tls else None) as client:
        client.sendall(post("Connection: close", stream=stream))
        data = await asyncio.to_thread(read, client, slowly=True)
        assert not await asyncio.to_thread(is_reset, client)
    assert data.count(b"x") >= len(PIECES) * len(PIECE)
    assert not engine.calls[0].was_aborted
    if stream:
        assert b"data: [DONE]\n\n" in data


async def test_without_a_limit_it_is_waited_for(serve: Serve) -> None:
    engine = FakeEngine(say(*PIECES))
    server = await serve(engine, write_timeout_s=None)
    with await asyncio.to_thread(connect, server) as client:
        client.sendall(post(stream=True))
        [call] = await engine.wait_for_calls(1)
        await asyncio.sleep(SHORT_S / 4)
        assert not call.ended.is_set()
        assert b"data: [DONE]\n\n" in await asyncio.to_thread(read, client)
