"""Scenarios as those of `test_scenarios`: clients that send slowly, read slowly, or not at all."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from server import outgoing
from tests.chaos.stage import LONG, MAX_NUM_SEQS, Scenario, Stage, act, raw_post, reset
from tests.factories import expected_output
from tests.factories_text import byte_level

pytestmark = pytest.mark.anyio


async def a_reader_takes_its_time(stage: Stage) -> None:
    reader, writer = await stage.send(prompt=[9], stream=True, **LONG)
    got = b""
    while b"[DONE]" not in got:
        got += await reader.read(64)
        await asyncio.sleep(0)
    writer.close()
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in _events(got)]
    tokens = expected_output([9], 100, frozenset())
    assert "".join(texts) == byte_level().decode(tokens)


async def a_reader_stops_and_leaves(stage: Stage) -> None:
    _, writer = await stage.send(prompt=[9], stream=True, n=8, **LONG)
    await stage.until(lambda: len(stage.ends) > 4, "some choices have ended")
    reset(writer)


async def a_reader_stops_and_stays(stage: Stage) -> None:
    """Its choices are aborted in the middle, and one of another client goes on."""
    stage.runner.hold()
    with stage.send_and_stop(prompt=[9], stream=True, n=MAX_NUM_SEQS - 1, **LONG):
        other, writer = await stage.send(prompt=[8], stream=True, **LONG)
        await stage.until(lambda: stage.runner.num_reached > 0, "a step has begun")
        await stage.step_until(lambda: stage.engine.stats.num_running == MAX_NUM_SEQS, "all run")
        stage.runner.let(30)
        await stage.until(lambda: len(stage.connections) == 1, "it is cut off")
        await stage.step_until(lambda: stage.engine.stats.num_running == 1, "its choices are aborted")
        stage.runner.release()
        async with asyncio.timeout(10):
            await other.readuntil(b"[DONE]")
        writer.close()


async def test_fifty_readers_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for them is bounded, they are cut off, and others are answered all the time."""
    num_choices, mark = 3, 8192
    monkeypatch.setattr(outgoing, "_MAX_IN_SOCKET", 4096)  # their streams are small: so are the buffers

    async def scenario(stage: Stage) -> None:
        stage.runner.hold()
        clients = [stage.send_and_stop(prompt=[i], stream=True, n=num_choices, **LONG) for i in range(50)]
        await stage.until(lambda: len(stage.connections) == len(clients), "all have come")
        for connection in stage.connections:
            connection.transport.set_write_buffer_limits(mark)
        stopped = set(stage.connections)
        sizes = lambda: [connection.transport.get_write_buffer_size() for connection in stopped]  # noqa: E731
        # Step by step: tokens that come together go out as one event, and then there may be too little to wait.
        await stage.step_until(lambda: max(sizes()) > mark, "something waits for a reader")
        most_buffered, most_queued = max(sizes()), 0
        stage.runner.release()
        deadline_s = time.monotonic() + 60
        while stopped & stage.connections:
            assert time.monotonic() < deadline_s, "they are not cut off"
            queued = [len(stream.events) for stream in stage.engine._streams.values()]
            most_buffered, most_queued = max(most_buffered, *sizes()), max(most_queued, *queued, 0)
            assert (await stage.complete(prompt=[7], max_tokens=2)).status_code == 200
            await asyncio.sleep(0.01)
        assert mark < most_buffered < mark + 1024  # an event more
        assert most_queued <= LONG["max_tokens"] + 1  # all tokens, and the end
        for client in clients:
            client.close()

    await act(scenario, write_timeout=1)


def _events(body: bytes) -> list[bytes]:
    return [line for line in body.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: {")]


async def heads_and_bodies_come_slowly(stage: Stage) -> None:
    """One stops in its head, one in its body: both are cut off, and others do not notice."""
    in_head, in_body = (await stage.connect()), (await stage.connect())
    in_head[1].write(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
    in_body[1].write(raw_post({"prompt": [5]})[:-3])
    assert (await stage.complete(prompt=[6], max_tokens=2)).status_code == 200
    async with asyncio.timeout(10):
        assert b"200 OK" not in await in_head[0].read()
        assert b"200 OK" not in await in_body[0].read()
    for _, writer in (in_head, in_body):
        writer.close()


SCENARIOS: dict[Scenario, dict[str, Any]] = {
    a_reader_takes_its_time: {},
    a_reader_stops_and_leaves: {},
    a_reader_stops_and_stays: {"write_timeout": 1},
    heads_and_bodies_come_slowly: {"header_timeout": 1, "body_timeout": 1},
}
"""Those that need no arguments, with their settings."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_scenario(scenario: Scenario) -> None:
    await act(scenario, **SCENARIOS[scenario])
