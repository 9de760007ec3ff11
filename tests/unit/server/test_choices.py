"""Several choices as one stream, and every way in which it can end."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from engine.client import AsyncEngine
from engine.errors import EngineDead
from engine.params import SamplingParams
from server.choices import Chunks, run_choices
from server.convert import Generation, Work
from tests.factories_engine import Call, FakeEngine, Script, say

pytestmark = pytest.mark.anyio


def run(engine: FakeEngine, num_choices: int, begun: list[int] | None = None) -> Chunks:
    """Choice i has a prompt of i + 1 tokens i. The lengths of prompts whose output has begun go to `begun`."""
    generations = tuple(Generation((i,) * (i + 1), SamplingParams()) for i in range(num_choices))
    work = Work(generations, 1, priority=3, cache_salt="salt", num_each=1)
    return run_choices(cast(AsyncEngine, engine), work, ([] if begun is None else begun).append)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_each_beginning_is_told_once(num_choices: int) -> None:
    begun: list[int] = []
    [item async for item in run(FakeEngine(say("a", "b")), num_choices, begun)]
    assert sorted(begun) == list(range(1, num_choices + 1))


async def test_what_the_engine_is_asked_for() -> None:
    engine = FakeEngine(say("a"))
    [item async for item in run(engine, 2)]
    assert [call.prompt_token_ids for call in engine.calls] == [[0], [1, 1]]
    assert {(call.priority, call.cache_salt) for call in engine.calls} == {(3, "salt")}


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_every_chunk_of_every_choice_in_its_order(num_choices: int) -> None:
    chunks = [(index, chunk.text) async for index, chunk in run(FakeEngine(say("a", "b", "c")), num_choices)]
    for i in range(num_choices):
        assert [text for index, text in chunks if index == i] == ["a", "b", "c"]
    assert len(chunks) == 3 * num_choices


async def test_chunks_come_as_they_are_there() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    chunks = run(FakeEngine(lambda call: say(gates[call.prompt_token_ids[0]], "x")), 2)
    gates[1].set()
    assert (await anext(chunks))[0] == 1
    gates[0].set()
    assert (await anext(chunks))[0] == 0
    assert [item async for item in chunks] == []


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_closing_it_aborts_every_choice(num_choices: int) -> None:
    engine = FakeEngine(say("a", asyncio.Event()))
    chunks = run(engine, num_choices)
    await anext(chunks)
    await engine.wait_for_calls(num_choices)
    await chunks.aclose()
    assert all(call.ended.is_set() and call.was_aborted for call in engine.calls)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_cancelling_its_reader_aborts_every_choice(num_choices: int) -> None:
    engine = FakeEngine(say(asyncio.Event()))

    async def read() -> None:
        async for _ in run(engine, num_choices):
            pass

    reader = asyncio.create_task(read())
    await engine.wait_for_calls(num_choices)
    reader.cancel()
    await asyncio.wait({reader})
    assert reader.cancelled()
    assert all(call.ended.is_set() and call.was_aborted for call in engine.calls)


async def test_a_choice_that_waits_for_a_slow_reader_is_aborted_too() -> None:
    engine = FakeEngine(lambda call: say(*"abcdefgh") if call.prompt_token_ids == [0] else say(asyncio.Event()))
    chunks = run(engine, 2)
    await anext(chunks)
    await engine.wait_for_calls(2)
    await asyncio.sleep(0)  # now choice 0 has filled the queue and waits
    await chunks.aclose()
    assert all(call.ended.is_set() and call.was_aborted for call in engine.calls)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_an_error_of_one_choice_is_raised_and_ends_the_others(num_choices: int) -> None:
    def script(call: Call) -> Script:
        return say("a", EngineDead("it broke")) if call.prompt_token_ids == [0] else say("a", asyncio.Event())

    engine = FakeEngine(script)
    with pytest.raises(EngineDead, match="it broke"):
        [item async for item in run(engine, num_choices)]
    assert all(call.ended.is_set() for call in engine.calls)


async def test_an_engine_that_refuses_at_once_leaves_nothing_open() -> None:
    engine = FakeEngine(say("a"))
    engine.dead = EngineDead("it broke")
    with pytest.raises(EngineDead):
        await anext(run(engine, 2))
    assert engine.calls == []
