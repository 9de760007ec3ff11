"""A small HTTP server in the test's event loop: each test says, byte for byte, what it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from loadtest.target import Target

Answer = Callable[["Received"], AsyncGenerator[bytes, None]]
"""Yields the pieces of a response, head included, as they go on the wire; the connection closes after the last."""

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END_OF_BODY = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    """Parsed; None when empty."""


@dataclass(slots=True)
class SSEServer:
    """What a running server has seen."""

    target: Target
    received: list[Received] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0
    """Most requests that were open at once."""


@asynccontextmanager
async def serve(answer: Answer) -> AsyncIterator[SSEServer]:
    """Serve on a free port until the block ends."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.num_open += 1
        seen.max_open = max(seen.max_open, seen.num_open)
        try:
            request = await _read_request(reader)
            seen.received.append(request)
            async for piece in answer(request):
                writer.write(piece)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):  # the client left: what some tests are about
            pass
        finally:
            seen.num_open -= 1
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    seen = SSEServer(Target("127.0.0.1", server.sockets[0].getsockname()[1]))
    async with server:
        yield seen


def plain(status: str, body: str) -> bytes:
    """A complete response with a length."""
    content = body.encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def chunked(data: bytes) -> bytes:
    """`data` as one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text_chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    """A chunk of a streamed completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage_chunk(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """The chunk that `stream_options.include_usage` asks for."""
    details = {"cached_tokens": cached_tokens}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "prompt_tokens_details": details}
    return {"choices": [], "usage": usage}


async def complete(request: Received) -> AsyncGenerator[bytes, None]:
    """Answer a streamed completion as a good server does: max_tokens chunks, a usage if asked for, [DONE]."""
    num_tokens = request.body["max_tokens"]
    yield STREAM_HEAD
    for number in range(num_tokens):
        yield chunked(event(text_chunk(f" {number}", "length" if number == num_tokens - 1 else None)))
    if (request.body.get("stream_options") or {}).get("include_usage"):
        yield chunked(event(usage_chunk(len(request.body["prompt"]), num_tokens)))
    yield chunked(b"data: [DONE]\n\n") + END_OF_BODY


async def _read_request(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    request_line, *lines = head.strip().split("\r\n")
    method, path, _ = request_line.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    content = await reader.readexactly(int(headers["content-length"]))
    return Received(method, path, headers, json.loads(content) if content else None)
