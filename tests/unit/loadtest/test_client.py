"""Client and wire against a real socket: every way a request can end, and what is recorded of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from loadtest.client import Client, ServerUnusable, first_model, server_version
from loadtest.record import RequestRecord
from loadtest.workload import LoadSpec, make_jobs
from tests.unit.loadtest.sse_server import (
    END_OF_BODY,
    STREAM_HEAD,
    Answer,
    Received,
    chunked,
    complete,
    event,
    plain,
    serve,
    text_chunk,
)

pytestmark = pytest.mark.anyio

SPEC = LoadSpec(num_requests=1, input_len=3, output_len=4, spread=0.0)


async def send(answer: Answer, *, timeout_s: float = 30.0) -> RequestRecord:
    """Send one completion to a server that answers so."""
    async with serve(answer) as server:
        return await Client(server.target, SPEC.path, timeout_s=timeout_s).send(make_jobs(SPEC, "m")[0])


def failure(record: RequestRecord) -> tuple[str, str]:
    assert record.failure is not None
    return record.failure.kind, record.failure.message


async def test_a_good_answer() -> None:
    async with serve(complete) as server:
        client = Client(replace(server.target, path="/llm", api_key="hush"), SPEC.path, timeout_s=30.0)
        record = await client.send(make_jobs(SPEC, "m")[0])
    assert record.failure is None
    assert (record.num_prompt_tokens, record.num_output_tokens, record.counted_by) == (3, 4, "usage")
    assert record.started_s < record.chunk_times_s[0]
    assert record.chunk_times_s == sorted(record.chunk_times_s)
    assert len(record.chunk_times_s) == 4
    assert record.chunk_times_s[-1] <= record.finished_s
    [request] = server.received
    assert (request.method, request.path) == ("POST", "/llm/v1/completions")
    assert request.headers["authorization"] == "Bearer hush"
    assert request.headers["content-type"] == "application/json"
    counters = client.counters
    assert (counters.num_running, counters.num_done, counters.num_failed, counters.num_chunks) == (0, 1, 0, 4)


async def test_pieces_cut_anywhere() -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        body = b"".join(event(text_chunk(text)) for text in "abc") + event(text_chunk("d", "stop"))
        response = STREAM_HEAD + b"".join(chunked(body[at : at + 7]) for at in range(0, len(body), 7)) + END_OF_BODY
        for at in range(0, len(response), 11):
            yield response[at : at + 11]

    record = await send(answer)
    assert record.failure is None
    assert (record.num_output_tokens, record.counted_by) == (4, "chunks")


async def test_a_body_that_ends_with_the_connection() -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        yield b"HTTP/1.1 200 OK\r\n\r\n" + event(text_chunk("a", "stop"))

    assert (await send(answer)).failure is None


async def test_the_clock_of_a_late_request_starts_when_it_was_due() -> None:
    due_s = time.perf_counter() - 100.0
    async with serve(complete) as server:
        record = await Client(server.target, SPEC.path, timeout_s=30.0).send(make_jobs(SPEC, "m")[0], due_s=due_s)
    assert record.ttft_s is not None
    assert record.ttft_s > 100.0


async def test_an_error_status_is_counted_with_its_body() -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        yield plain("503 Service Unavailable", '{"error": {"message": "busy"}}')

    assert failure(await send(answer)) == ("http 503", '{"error": {"message": "busy"}}')


async def test_an_error_event() -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        yield (
            STREAM_HEAD + chunked(event(text_chunk("a"))) + chunked(event({"error": {"message": "died"}})) + END_OF_BODY
        )

    assert failure(await send(answer)) == ("error event", "died")


async def test_a_connection_that_breaks_in_the_stream() -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        yield STREAM_HEAD + chunked(event(text_chunk("a", "stop")))

    record = await send(answer)
    assert failure(record)[0] == "truncated"
    assert len(record.chunk_times_s) == 1


async def test_a_stream_that_ends_without_a_finish() -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        yield STREAM_HEAD + chunked(event(text_chunk("a"))) + END_OF_BODY

    assert failure(await send(answer))[0] == "truncated"


async def test_a_stream_that_is_not_json() -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        yield STREAM_HEAD + chunked(b"data: {oops\n\n") + END_OF_BODY

    assert failure(await send(answer))[0] == "bad stream"


async def test_no_answer_at_all() -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        for nothing in ():
            yield nothing

    assert failure(await send(answer))[0] == "truncated"


async def test_what_is_not_http() -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        yield b"SSH-2.0-OpenSSH_9.6\r\n\r\n"

    assert failure(await send(answer))[0] == "truncated"


async def test_a_timeout_closes_the_connection() -> None:
    left = asyncio.Event()

    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        yield STREAM_HEAD
        try:
            while True:  # until the client leaves, which the socket says when written to
                yield chunked(event(text_chunk("a")))
                await asyncio.sleep(0.01)
        finally:
            left.set()

    async with serve(answer) as server:
        record = await Client(server.target, SPEC.path, timeout_s=0.2).send(make_jobs(SPEC, "m")[0])
        await asyncio.wait_for(left.wait(), 10.0)
    assert failure(record) == ("timeout", "not done after 0.2 s")


async def test_nobody_listens() -> None:
    async with serve(complete) as server:
        target = server.target
    record = await Client(target, SPEC.path, timeout_s=30.0).send(make_jobs(SPEC, "m")[0])
    assert failure(record)[0] == "connection"
    with pytest.raises(ServerUnusable, match="does not answer"):
        await first_model(target)


async def test_the_server_is_asked_what_it_is() -> None:
    async def answer(request: Received) -> AsyncGenerator[bytes, None]:
        pages = {"/v1/models": '{"data": [{"id": "first"}, {"id": "second"}]}', "/version": '{"version": "1.2"}'}
        yield plain("200 OK", pages[request.path])

    async with serve(answer) as server:
        assert await first_model(server.target) == "first"
        assert await server_version(server.target) == {"version": "1.2"}


@pytest.mark.parametrize(("status", "body"), [("200 OK", '{"data": []}'), ("200 OK", "hello"), ("401 No", "key?")])
async def test_a_server_that_names_no_model(status: str, body: str) -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        yield plain(status, body)

    async with serve(answer) as server:
        with pytest.raises(ServerUnusable):
            await first_model(server.target)


async def test_a_server_without_a_version() -> None:
    async def answer(_: Received) -> AsyncGenerator[bytes, None]:
        yield plain("404 Not Found", "{}")

    async with serve(answer) as server:
        assert await server_version(server.target) is None
