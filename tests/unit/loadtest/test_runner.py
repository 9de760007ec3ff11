"""Closed and open loops: how many requests are open at once, in which order they go, what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from loadtest.client import Client
from loadtest.runner import ClosedLoop, OpenLoop
from loadtest.workload import Job, LoadSpec, make_jobs
from tests.unit.loadtest.sse_server import Received, SSEServer, complete, serve

pytestmark = pytest.mark.anyio

SPEC = LoadSpec(num_requests=9, input_len=3, output_len=6, spread=0.5)


def client_of(server: SSEServer) -> tuple[Client, list[Job]]:
    return Client(server.target, SPEC.path, timeout_s=30.0), make_jobs(SPEC, "m")


async def test_a_closed_loop_holds_its_clients_busy_and_no_more() -> None:
    three_came = asyncio.Event()

    async def answer(request: Received) -> AsyncGenerator[bytes, None]:
        """The first three wait for each other: all three clients must be at work at once."""
        if len(server.received) == 3:
            three_came.set()
        await three_came.wait()
        async for piece in complete(request):
            yield piece

    async with serve(answer) as server:
        client, jobs = client_of(server)
        result = await ClosedLoop(3).run(client, jobs)
    assert server.max_open == 3
    assert [record.failure for record in result.records] == [None] * 9
    assert result.duration_s >= max(record.e2e_s for record in result.records)
    assert client.counters.num_done == 9


async def test_records_are_in_the_order_of_the_jobs() -> None:
    async with serve(complete) as server:
        client, jobs = client_of(server)
        result = await ClosedLoop(4).run(client, jobs)
    sent = {tuple(request.body["prompt"]): request.body["max_tokens"] for request in server.received}
    lens = [(record.num_prompt_tokens, record.num_output_tokens) for record in result.records]
    assert sorted(lens) == sorted((len(prompt), max_tokens) for prompt, max_tokens in sent.items())
    assert [length for length, _ in lens] == [job.num_prompt_tokens for job in jobs]


async def test_more_clients_than_jobs() -> None:
    async with serve(complete) as server:
        client, jobs = client_of(server)
        result = await ClosedLoop(50).run(client, jobs)
    assert len(result.records) == len(server.received) == 9


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    all_came = asyncio.Event()

    async def answer(request: Received) -> AsyncGenerator[bytes, None]:
        """Nobody is answered until all have come."""
        if len(server.received) == 9:
            all_came.set()
        await all_came.wait()
        async for piece in complete(request):
            yield piece

    async with serve(answer) as server:
        client, jobs = client_of(server)
        result = await OpenLoop(rate=2000.0, seed=1).run(client, jobs)
    assert server.max_open == 9
    starts = [record.started_s for record in result.records]
    assert starts == sorted(starts)
    assert [record.num_prompt_tokens for record in result.records] == [job.num_prompt_tokens for job in jobs]
