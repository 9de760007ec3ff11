"""What comes over a socket and is no request that may be answered: too large, or no HTTP as it should be."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.limits import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, MAX_URL_BYTES
from tests.factories_engine import FakeEngine, say
from tests.factories_sockets import BODY, GET, POST, SOON_S, Serve, Streams, answers_in, ask, closed, socket_servers

pytestmark = pytest.mark.anyio

START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with socket_servers() as start:
        yield start


async def refusal(streams: Streams, data: bytes) -> tuple[int, str | None]:
    """Status and code of the one answer to `data`, after which the connection is closed."""
    streams[1].write(data)
    answer = await closed(streams[0])
    assert b"\r\nconnection: close\r\n" in answer
    [(status, body)] = answers_in(answer)
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    return status, body["error"]["code"]


def head(num_headers: int = 0, url_len: int = 10, header_bytes: int = 0) -> bytes:
    """A request of exactly these sizes, its Host among them."""
    url = b"/v1/models?".ljust(url_len, b"a")
    lines = [b"Host: x"]
    if header_bytes:
        lines.append(b"Y: ")
        left = header_bytes - sum(len(line) + 2 for line in lines)
        lines[-1] += b"a" * left
    lines += [b"X: a"] * (num_headers - len(lines))
    return b"GET %s HTTP/1.1\r\n%s\r\n\r\n" % (url, b"\r\n".join(lines))


@pytest.mark.parametrize(
    ("sizes", "status", "code"),
    [
        ({"num_headers": MAX_HEADERS}, 431, "headers_too_large"),
        ({"header_bytes": MAX_HEAD_BYTES}, 431, "headers_too_large"),
        ({"url_len": MAX_URL_BYTES}, 414, "url_too_long"),
    ],
    ids=["headers", "bytes", "URL"],
)
@pytest.mark.parametrize("num_before", [0, 2])
async def test_a_head_may_be_so_large_and_no_larger(
    serve: Serve, sizes: dict[str, int], status: int, code: str, num_before: int
) -> None:
    streams = await (await serve())()
    assert b"200 OK" in await ask(streams, head(**sizes))
    streams[1].write(GET * num_before + head(**{name: size + 1 for name, size in sizes.items()}))
    *answers, (last_status, last) = answers_in(await closed(streams[0]))
    assert [each[0] for each in answers] == [200] * num_before
    assert (last_status, last["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("start", "more", "expected"),
    [
        (START + b"X: ", b"a", (431, "headers_too_large")),
        (START, b"a", (431, "headers_too_large")),
        (START, b"X: a\r\n", (431, "headers_too_large")),
        (b"GET /", b"a", (414, "url_too_long")),
        (b"", b"\r\n", (431, "headers_too_large")),
        (CHUNKED + b"1;", b"a", (431, "headers_too_large")),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"X: a\r\n", (431, "headers_too_large")),
        (CHUNKED + b"1\r\na\r\n0\r\nX: ", b"a", (431, "headers_too_large")),
    ],
    ids=["value", "name", "headers", "URL", "blank lines", "chunk extension", "trailers", "trailer"],
)
async def test_memory_is_bounded_whatever_does_not_end(
    serve: Serve, start: bytes, more: bytes, expected: tuple[int, str]
) -> None:
    """A client that sends 32 MB of it sees the answer, though it reads nothing before it has sent it all."""
    connect = await serve()
    reader, writer = await connect()
    flood = more * (1024 * 1024 // len(more))
    tracemalloc.start()
    try:
        writer.write(start)
        for _ in range(32):
            writer.write(flood)
            await writer.drain()
        assert await refusal((reader, writer), b"") == expected
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()


async def test_few_requests_wait_behind_one_that_is_answered(serve: Serve) -> None:
    gate = asyncio.Event()
    connect = await serve(say("a", gate, "b"))
    streams = await connect()
    for _ in range(3):  # in one piece each, which the parser does not stop in
        streams[1].write(POST % len(BODY) + BODY + GET * 10)
    gate.set()
    *answers, (status, last) = answers_in(await closed(streams[0]))
    assert [each[0] for each in answers] == [200] * (1 + MAX_PIPELINED)
    assert (status, last["error"]["code"]) == (400, "invalid_http")


async def test_a_client_that_leaves_is_seen_behind_what_it_pipelines(serve: Serve) -> None:
    for behind in (GET, b"rubbish\r\n\r\n"):
        engine = FakeEngine(say("a", asyncio.Event()))
        connect = await serve(engine)
        _, writer = await connect()
        writer.write(POST % len(BODY) + BODY + behind)
        [call] = await engine.wait_for_calls(1)
        writer.close()
        async with asyncio.timeout(SOON_S):
            await call.ended.wait()


INVALID = {
    "rubbish": b"hello there\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.9\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another version": b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    "an old version": b"GET /v1/models\r\n\r\n",
    "a new version": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    "a space in the URL": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "not ASCII": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "no path": b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
    "no colon": START + b"abc\r\n\r\n",
    "no name": START + b": a\r\n\r\n",
    "a space before the colon": START + b"Content-Length : 5\r\n\r\nhello",
    "NUL": START + b"X: a\x00b\r\n\r\n",
    "a folded header": START + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n",
    "LF for CRLF": START + b"X: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "CR for CRLF": START + b"X: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": START + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a length twice": START + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "a list of lengths": START + b"Content-Length: 5, 5\r\n\r\nhello",
    "an empty length": START + b"Content-Length: \r\n\r\nhello",
    "a signed length": START + b"Content-Length: +5\r\n\r\nhello",
    "a length in hex": START + b"Content-Length: 0x5\r\n\r\nhello",
    "a length of 20 digits": START + b"Content-Length: 99999999999999999999\r\n\r\nhello",
    "length, then chunked": START + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked, then length": START + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "chunked twice": START + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked, identity": START + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "gzip, chunked": START + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": START + b"Transfer-Encoding: identity\r\n\r\nhello",
    "xchunked": START + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "\\vchunked": START + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    '"chunked"': START + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no chunk size": CHUNKED + b"xyz\r\n",
    "a large chunk size": CHUNKED + b"fffffffffffffffff\r\n",
    "a signed chunk size": CHUNKED + b"+1\r\na\r\n",
    "a chunk size with 0x": CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
    "a space after the chunk size": CHUNKED + b"1 \r\na\r\n0\r\n\r\n",
    "LF after the chunk size": CHUNKED + b"1\na\r\n0\r\n\r\n",
    "LF in a chunk extension": CHUNKED + b"1;a\na\r\n0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "a length as trailer": CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
}


@pytest.mark.parametrize("data", INVALID.values(), ids=INVALID.keys())
async def test_what_is_not_as_it_should_be_is_refused(serve: Serve, data: bytes) -> None:
    """And what comes behind it is not taken for a request."""
    engine = FakeEngine()
    connect = await serve(engine)
    assert await refusal(await connect(), data + POST % len(BODY) + BODY) == (400, "invalid_http")
    streams = await connect()
    assert b"200 OK" in await ask(streams)
    assert await refusal(streams, data) == (400, "invalid_http")
    assert engine.calls == []


async def test_it_is_also_when_it_comes_byte_by_byte(serve: Serve) -> None:
    connect = await serve()
    for data in (INVALID["length, then chunked"], INVALID["a chunk longer than its size"], INVALID["no colon"]):
        reader, writer = await connect()
        writer.get_extra_info("socket").setsockopt(6, 1, 1)  # TCP_NODELAY
        for byte in data:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await refusal((reader, writer), b"") == (400, "invalid_http")


@pytest.mark.parametrize(
    ("what", "hint"),
    [("tls", "use http:// in the URL"), ("http/2", "HTTP/2 was spoken"), ("ssh", "begins as nothing that HTTP knows")],
)
async def test_who_speaks_something_else_is_told_so(serve: Serve, what: str, hint: str) -> None:
    streams = await (await serve())()
    streams[1].write(INVALID[what])
    [(_, body)] = answers_in(await closed(streams[0]))
    assert hint in body["error"]["message"]


async def test_a_stream_is_whole_before_what_comes_behind_it_is_refused(serve: Serve) -> None:
    gate = asyncio.Event()
    connect = await serve(say("a", gate, "b"))
    reader, writer = await connect()
    content = b'{"prompt": "hi", "stream": true}'
    writer.write(POST % len(content) + content)
    async with asyncio.timeout(SOON_S):
        stream = await reader.readuntil(b'"text":"a"')
        writer.write(b"rubbish\r\n\r\n")
        await writer.drain()
        gate.set()
        stream += await reader.readuntil(b"0\r\n\r\n")
    assert b"data: [DONE]\n\n" in stream
    [(status, _)] = answers_in(await closed(reader))
    assert status == 400


async def test_trailers_are_no_headers(serve: Serve) -> None:
    connect = await serve(api_key=("secret",))
    chunk = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    assert b" 401 " in await ask(await connect(), CHUNKED + chunk + b"Authorization: Bearer secret\r\n\r\n")


async def test_a_request_to_change_the_protocol_is_answered_in_this_one(serve: Serve) -> None:
    """As Java's client makes it; what comes behind it is read on."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    streams = await (await serve())()
    for request in (GET, POST % len(BODY)):
        body = BODY if request != GET else b""
        asked = request.replace(b"Host: x\r\n", b"Host: x\r\n" + upgrade) + body
        assert b"200 OK" in await ask(streams, asked + GET)
        assert b'"list"' in await ask(streams, b"")


async def test_they_are_logged_and_counted(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server")
    connect = await serve()
    await refusal(await connect(), head(num_headers=MAX_HEADERS + 1).replace(b"GET", b"POST"))
    await refusal(await connect(), head(url_len=MAX_URL_BYTES + 1))
    await refusal(await connect(), INVALID["tls"])
    await refusal(await connect(), INVALID["no chunk size"])
    metrics = (await ask(await connect(), GET.replace(b"/v1/models", b"/metrics"))).decode().partition("\r\n\r\n")[2]
    counts = {
        (sample.name, *(sample.labels[name] for name in ("route", "status", "reason") if name in sample.labels)): value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if (value := sample.value)
    }
    assert counts["chairlift_http_responses_total", "none", "431"] == 1
    assert counts["chairlift_http_responses_total", "none", "400"] == 2
    assert counts["chairlift_requests_rejected_total", "headers_too_large"] == 1
    assert counts["chairlift_requests_rejected_total", "invalid_http"] == 1
    lines = [record.getMessage() for record in caplog.records if record.name == "server.requestlog"]
    assert [line.partition(" in ")[0] for line in lines] == [
        "POST /v1/models 431",
        "GET /v1/models 414",
        "- - 400",
        "POST /v1/completions 400",
    ]
    assert "use http:// in the URL" in caplog.text


async def test_a_refused_upload_sees_why(serve: Serve) -> None:
    """The client sends 64 MB before it reads."""
    reader, writer = await (await serve())()
    writer.write(POST % (64 * 1024 * 1024))
    for _ in range(64):
        writer.write(b" " * 1024 * 1024)
        await writer.drain()
    [(status, body)] = answers_in(await closed(reader))
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert json.dumps(body)
