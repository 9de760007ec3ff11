"""What may happen to a server, a scenario each, over a fake model (`stage`); and after each the same invariants.

No request runs or waits, all blocks are free, no thread, task or descriptor is left, a canary's text is unchanged, each
accepted request has ended exactly once, and the counters add up. `test_slow_clients` has those that are slow,
`test_processes` what needs a process.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.chaos.stage import (
    BLOCK_SIZE,
    BUDGET,
    LONG,
    MAX_NUM_SEQS,
    Scenario,
    Stage,
    act,
    leave,
    raw_post,
    reset,
    staged,
)

pytestmark = pytest.mark.anyio

# Requests whose time is over.


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
async def test_a_deadline_passes_in_the_queue(stream: bool) -> None:
    async def scenario(stage: Stage) -> None:
        stage.runner.hold()
        _, other = await stage.send(prompt=[5], max_tokens=2)
        await stage.until(lambda: stage.engine.stats.step_started_s is not None, "a step has begun")
        response = await stage.complete(prompt=[9], stream=stream, timeout_ms=30, **LONG)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        other.close()

    await act(scenario)


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
async def test_a_deadline_passes_in_decode(stream: bool) -> None:
    async def scenario(stage: Stage) -> None:
        stage.runner.hold()
        stage.runner.let(2)
        response = await stage.complete(prompt=[9], stream=stream, **LONG)
        if stream:
            *chunks, error, end = response.text.strip().split("\n\n")
            assert (response.status_code, end) == (200, "data: [DONE]")
            assert len(chunks) in {1, 2}  # tokens that come close together are in one
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")

    await act(scenario, request_timeout=1)


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
async def test_what_waits_too_long_is_dropped_before_its_prefill(stream: bool) -> None:
    async def scenario(stage: Stage) -> None:
        now_s = time.monotonic()
        stage.core._clock = lambda: now_s  # stands still
        stage.runner.hold()
        others = [await stage.send(prompt=[20 + i], **LONG) for i in range(MAX_NUM_SEQS)]
        await stage.until(lambda: stage.engine.stats.step_started_s is not None, "a step has begun")
        await stage.step_until(lambda: stage.engine.stats.num_running == MAX_NUM_SEQS, "all places are taken")
        late = asyncio.create_task(stage.complete(prompt=[9], stream=stream, **LONG))
        await stage.step_until(lambda: stage.engine.stats.num_waiting == 1, "it waits")
        assert not late.done()
        now_s += 3600.0
        await stage.step_until(late.done, "it is dropped")
        response = await late
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert response.headers["retry-after"] == "60"
        assert max(row.request_id for plan in stage.runner.plans for row in plan.rows) == max(stage.submitted) - 1
        for _, other in others:
            other.close()
        stage.runner.release()
        await stage.until(lambda: stage.engine.stats.num_running == 0, "all have ended")
        stage.core._clock = time.monotonic

    await act(scenario, max_queue_wait=600)


# Clients that leave.


async def in_the_queue(stage: Stage, stream: bool) -> asyncio.StreamWriter:
    """MAX_NUM_SEQS others run, so this one waits."""
    stage.runner.hold()
    others = [await stage.send(prompt=[20 + i], stream=True, **LONG) for i in range(MAX_NUM_SEQS)]
    await stage.until(lambda: stage.runner.num_reached > 0, "a step has begun")
    await stage.step_until(lambda: stage.engine.stats.num_running == MAX_NUM_SEQS, "all places are taken")
    _, writer = await stage.send(prompt=[9], stream=stream, **LONG)
    await stage.step_until(lambda: stage.engine.stats.num_waiting == 1, "it waits")
    for _, other in others:
        other.close()
    return writer


async def in_prefill(stage: Stage, stream: bool) -> asyncio.StreamWriter:
    """Its prompt takes three steps; one is done."""
    stage.runner.hold()
    reached = stage.runner.num_reached
    _, writer = await stage.send(prompt=[9] * (2 * BUDGET + 4), stream=stream, **LONG)
    stage.runner.let(1)
    await stage.until(lambda: stage.runner.num_reached == reached + 2, "the second step has begun")
    return writer


async def in_decode(stage: Stage, stream: bool) -> asyncio.StreamWriter:
    """Three steps are done."""
    stage.runner.hold()
    reached = stage.runner.num_reached
    _, writer = await stage.send(prompt=[9], stream=stream, **LONG)
    stage.runner.let(3)
    await stage.until(lambda: stage.runner.num_reached == reached + 4, "the fourth step has begun")
    return writer


async def at_the_last_token(stage: Stage, stream: bool) -> asyncio.StreamWriter:
    """The step that makes its last token has begun."""
    stage.runner.hold()
    reached = stage.runner.num_reached
    _, writer = await stage.send(prompt=[9], stream=stream, max_tokens=3, ignore_eos=True)
    stage.runner.let(2)
    await stage.until(lambda: stage.runner.num_reached == reached + 3, "the third step has begun")
    return writer


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
@pytest.mark.parametrize("go", [leave, reset], ids=["FIN", "RST"])
@pytest.mark.parametrize("moment", [in_the_queue, in_prefill, in_decode, at_the_last_token])
async def test_a_client_leaves(
    moment: Callable[[Stage, bool], Awaitable[asyncio.StreamWriter]],
    go: Callable[[asyncio.StreamWriter], None],
    stream: bool,
) -> None:
    async def scenario(stage: Stage) -> None:
        go(await moment(stage, stream))
        stage.runner.release()

    await act(scenario)


async def two_hundred_leave_at_once(stage: Stage) -> None:
    stage.runner.hold()
    writers = [
        (await stage.send(prompt=[i % 50, 5], stream=i % 2 == 0, n=1 + i % 3 // 2, **LONG))[1] for i in range(200)
    ]
    await stage.step_until(lambda: stage.engine.stats.num_running == MAX_NUM_SEQS, "some run")
    for i, writer in enumerate(writers):
        (leave if i % 3 else reset)(writer)
    stage.runner.release()


async def all_leave_in_their_bodies(stage: Stage) -> None:
    for i in range(20):
        _, writer = await stage.connect()
        writer.write(raw_post({"prompt": [5]})[: -1 - i])
        await writer.drain()
        (leave if i % 2 else reset)(writer)


async def one_leaves_between_requests_of_a_connection(stage: Stage) -> None:
    for _ in range(3):
        reader, writer = await stage.send(prompt=[5], max_tokens=2)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw_post({"prompt": [6], "max_tokens": 2}))
        writer.close()


# Faults.


async def statuses(stage: Stage, *bodies: dict[str, Any], path: str = "/v1/completions") -> list[int]:
    """Send all at once; their statuses."""
    async with stage.client() as client:
        responses = await asyncio.gather(*(client.post(path, json=body) for body in bodies))
    return [response.status_code for response in responses]


GOOD = {"max_tokens": 30, "ignore_eos": True}


@pytest.mark.parametrize("kind", ["raise", "oom", "slow=0.05"])
@pytest.mark.parametrize("phase", ["launch", "collect", "sample"])
async def test_a_fault_of_one_step_fails_nobody(phase: str, kind: str) -> None:
    async def scenario(stage: Stage) -> None:
        stage.runner.hold()
        sending = asyncio.create_task(
            statuses(stage, {"prompt": [5], **GOOD}, {"prompt": [6], **GOOD}, {"prompt": [7], **GOOD})
        )
        await stage.step_until(lambda: stage.engine.stats.num_running == 3, "all run")
        stage.make_faults(f"{phase}:{kind}@2")
        stage.runner.release()
        assert await sending == [200, 200, 200]

    await act(scenario)


@pytest.mark.parametrize("phase", ["launch", "collect"])
@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
async def test_a_prompt_that_cannot_be_computed_fails_alone(phase: str, stream: bool) -> None:
    async def scenario(stage: Stage) -> None:
        stage.make_faults(f"{phase}:oom@1x0?42")
        bodies = [{"prompt": [first, 5], "stream": stream, **GOOD} for first in (41, 42, 43)]
        assert await statuses(stage, *bodies) == [200, 500, 200]
        assert (await stage.complete(prompt=[42], max_tokens=1)).json()["error"]["code"] == "engine_error"

    await act(scenario)


FAULTS_OF_REQUESTS = {
    "tokenize": ("/v1/completions", {"prompt": "riders"}, 500),
    "template": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "riders"}]}, 500),
    "detokenize": ("/v1/completions", {"prompt": [5]}, 500),
    "grammar": ("/v1/completions", {"prompt": [5], "structured_outputs": {"regex": "(.|\n)*"}}, 500),
}


@pytest.mark.parametrize("kind", ["raise", "oom", "slow=0.05"])
@pytest.mark.parametrize("phase", FAULTS_OF_REQUESTS)
async def test_a_fault_of_a_request_is_its_own(phase: str, kind: str) -> None:
    path, body, status = FAULTS_OF_REQUESTS[phase]

    async def scenario(stage: Stage) -> None:
        stage.make_faults(f"{phase}:{kind}")
        [struck] = await statuses(stage, {**body, **GOOD}, path=path)
        assert struck == (200 if "slow" in kind else status)
        assert set(await statuses(stage, *[{**body, **GOOD}] * 3, path=path)) == {200}

    await act(scenario, warm_up=body if phase == "grammar" else None)


async def test_a_parser_that_fails_ends_its_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from server.chat.reader import Reader

    async def scenario(stage: Stage) -> None:
        chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **GOOD}
        monkeypatch.setattr(Reader, "feed", lambda *_: 1 / 0)
        async with stage.client() as client:
            response = await client.post("/v1/chat/completions", json=chat)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        monkeypatch.undo()
        assert await statuses(stage, chat, path="/v1/chat/completions") == [200]

    await act(scenario, reasoning_parser="think")


async def an_observer_fails_once(stage: Stage) -> None:
    stage.make_faults("deliver:raise")
    assert await statuses(stage, {"prompt": [5], **GOOD}) == [200]


@pytest.mark.parametrize("fault", ["schedule:raise", "launch:raise@1x0", "sample:oom@1x0"])
async def test_a_fault_of_the_engine_fails_everyone_and_shows(fault: str) -> None:
    async with staged() as stage:
        stage.runner.hold()
        async with stage.client() as client:
            bodies = [{"prompt": [i], "stream": i % 2 == 0, **GOOD} for i in range(5, 15)]
            sending = asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            await stage.until(lambda: stage.runner.num_reached > 0, "a step has begun")
            stage.make_faults(fault)
            stage.runner.release()
            for response in await sending:  # those that have begun to stream have their error as an event
                assert response.status_code == 500 or response.text.endswith("data: [DONE]\n\n")
                assert '"engine_dead"' in response.text
            for path in ("/health", "/ready"):
                response = await client.get(path)
                assert response.status_code == 503
                assert "the engine has ended" in response.json()["error"]["message"]
            assert (await client.get("/live")).status_code == 200
        assert stage.engine._streams == {}
        stage.runner.release()


# Sizes.


@pytest.mark.parametrize("spare", [-2, -1, 0, 1])
@pytest.mark.parametrize("max_tokens", [1, 4])
async def test_a_cache_that_is_about_as_large_as_one_request(spare: int, max_tokens: int) -> None:
    """A request of exactly 8 blocks: one too many for 6 and 7, one that fits alone for 8 and 9. Four come at once."""
    prompt = [5] * (8 * BLOCK_SIZE - max_tokens)

    async def scenario(stage: Stage) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        assert await statuses(stage, *[body] * 4) == [200 if spare >= 0 else 400] * 4

    await act(scenario, num_blocks=8 + spare)


async def three_times_as_many_as_there_are_places(stage: Stage) -> None:
    bodies = [{"prompt": [i % 50] * (1 + i % 30), "stream": i % 2 == 0, **GOOD} for i in range(3 * MAX_NUM_SEQS * 8)]
    assert set(await statuses(stage, *bodies)) == {200}


async def test_three_times_as_many_as_are_let_in() -> None:
    """While the engine does nothing at all: refusals wait for nobody, and what was let in is answered whole."""
    num_queued = 5
    capacity = MAX_NUM_SEQS + num_queued

    async def scenario(stage: Stage) -> None:
        stage.runner.hold()
        bodies = [{"prompt": [i], "stream": i % 2 == 0, **LONG} for i in range(capacity)]
        before = len(stage.submitted)
        answers = asyncio.create_task(statuses(stage, *bodies))
        await stage.until(lambda: len(stage.engine._streams) == capacity, "all have come")
        async with stage.client() as client:
            for i in range(2 * capacity):
                body = {"prompt": [9], "stream": i % 2 == 0, **LONG}
                refused = await client.post("/v1/completions", json=body)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "overloaded"
                assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert not answers.done()
        stage.runner.release()
        assert await answers == [200] * capacity
        assert len(stage.submitted) == before + capacity

    await act(scenario, max_num_seqs=MAX_NUM_SEQS, max_queued_requests=num_queued)


# Time.


async def test_the_wall_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a day, back and forth, in the middle of a stream: nothing is measured by it."""

    async def scenario(stage: Stage) -> None:
        now = time.time
        reader, writer = await stage.send(prompt=[9], stream=True, **LONG)
        await reader.readuntil(b"data: ")
        for days in (1, -1, 400):
            monkeypatch.setattr(time, "time", lambda days=days: now() + 86400 * days)
            assert (await stage.complete(prompt=[6], max_tokens=2)).status_code == 200
            async with stage.client() as client:
                assert (await client.get("/health")).status_code == 200
        async with asyncio.timeout(10):
            await reader.readuntil(b"[DONE]")
        writer.close()

    await act(scenario)


SCENARIOS: dict[Scenario, dict[str, Any]] = {
    two_hundred_leave_at_once: {},
    all_leave_in_their_bodies: {},
    one_leaves_between_requests_of_a_connection: {},
    an_observer_fails_once: {},
    three_times_as_many_as_there_are_places: {},
}
"""Those that need no arguments, with their settings."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_scenario(scenario: Scenario) -> None:
    await act(scenario, **SCENARIOS[scenario])
