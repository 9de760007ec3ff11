"""The application behind uvicorn and our connections, on a real socket, for clients that write bytes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from config.schema import ServerConfig
from server.connections import connection_class
from tests.factories_engine import FakeEngine, Script
from tests.factories_http import make_app

LONG_S = 600  # longer than a test takes, however busy the machine is
SOON_S = 20.0
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
BODY = b'{"prompt": "hi"}'

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Server:
    """One that runs. Called, it opens a connection."""

    address: tuple[str, int]
    _writers: list[asyncio.StreamWriter]

    async def __call__(self) -> Streams:
        reader, writer = await asyncio.open_connection(*self.address)
        self._writers.append(writer)
        return reader, writer


Serve = Callable[..., Awaitable[Server]]


@asynccontextmanager
async def socket_servers() -> AsyncIterator[Serve]:
    """Gives a function that starts a server; what that returns opens a connection to it."""
    running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
    writers: list[asyncio.StreamWriter] = []

    async def start(
        said: Script | FakeEngine | None = None,
        *,
        app: Any = None,
        header_timeout_s: float = LONG_S,
        write_timeout_s: float | None = LONG_S,
        keep_alive_s: int = LONG_S,
        certificates: Path | None = None,
        **settings: Any,
    ) -> Server:
        """`said`: by the engine; `certificates`: of `factories_tls`, for HTTPS; `settings`: by name."""
        limits = {name: settings.pop(name) for name in ("max_connections",) if name in settings}
        protocol = connection_class(ServerConfig(**limits))
        protocol.header_timeout_s = header_timeout_s
        protocol.write_timeout_s = write_timeout_s
        sock = socket.create_server(("127.0.0.1", 0))
        app = app or make_app(said if isinstance(said, FakeEngine) else FakeEngine(said), **settings)
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            log_config=None,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=1,
            ssl_certfile=certificates and certificates / "cert.pem",
            ssl_keyfile=certificates and certificates / "key.pem",
        )
        server = uvicorn.Server(config)
        running.append((server, asyncio.create_task(server.serve([sock]))))

        return Server(sock.getsockname(), writers)

    yield start
    for writer in writers:
        writer.close()
    for server, task in running:
        server.should_exit = True
        await task


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes; fails if it does not."""
    async with asyncio.timeout(SOON_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def ask(streams: Streams, request: bytes = GET) -> bytes:
    """A request's answer: what comes first."""
    streams[1].write(request)
    async with asyncio.timeout(SOON_S):
        head = await streams[0].readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head + await streams[0].readexactly(length)


def answers_in(data: bytes) -> list[tuple[int, Any]]:
    """Status and JSON of each of the answers, which have a length, that a connection gave."""
    answers = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields[b"content-length"])
        answers.append((int(head.split()[1]), json.loads(data[:length])))
        data = data[length:]
    return answers
