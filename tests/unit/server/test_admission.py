"""Who is let in, who is not, and when to come back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import Request

from engine.errors import EngineError, Overloaded
from engine.messages import StepReport, StepStats
from server.admission import MAX_RETRY_S, MIN_RETRY_S, UNMEASURED_RETRY_S, Admission, Throughput
from server.errors import TooManyRequests
from tests.factories_engine import FakeEngine, say
from tests.factories_http import delete_at_end, make_client

STATS = StepStats(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, (), ())


def report(num_tokens: int) -> StepReport:
    return StepReport((), replace(STATS, num_prefix_queries=num_tokens))


def make_admission(**bounds: Any) -> Admission:
    return Admission(**({"max_requests": 4, "max_queued_tokens": 100, "throughput": Throughput()} | bounds))


def request() -> Request:
    return Request({"type": "http", "state": {}})


def test_requests_are_bounded_until_a_place_is_given_back() -> None:
    admission = make_admission()
    first = admission.admit(request(), num_requests=3, num_bytes=0)
    admission.admit(request(), num_requests=1, num_bytes=0)
    with pytest.raises(Overloaded, match="too many requests wait already: try again in 5 s"):
        admission.admit(request(), num_requests=1, num_bytes=0)
    first.release()
    first.release()  # the second time is nothing
    assert admission.num_requests == 1
    admission.admit(request(), num_requests=3, num_bytes=0)


def test_tokens_are_guessed_then_corrected_and_count_while_they_wait() -> None:
    admission = make_admission()
    place = admission.admit(request(), num_requests=1, num_bytes=320)
    assert admission.num_queued_tokens == 80
    with pytest.raises(Overloaded, match="too many prompt tokens"):
        admission.admit(request(), num_requests=1, num_bytes=120)
    place.correct(60)
    other = admission.admit(request(), num_requests=1, num_bytes=120)
    assert admission.num_queued_tokens == 90
    place.begun(60)
    assert admission.num_queued_tokens == 30
    place.release()
    other.release()
    assert admission.num_queued_tokens == admission.num_requests == 0


def test_what_finds_nothing_waiting_is_let_in_whatever_its_size() -> None:
    admission = make_admission()
    admission.admit(request(), num_requests=1000, num_bytes=10**7)


def test_429_if_the_operator_says_so() -> None:
    admission = make_admission(max_requests=0, too_many=True)
    admission.admit(request(), num_requests=1, num_bytes=0)
    with pytest.raises(TooManyRequests):
        admission.admit(request(), num_requests=1, num_bytes=0)


def test_retry_after_is_measured() -> None:
    now_s = 0.0
    throughput = Throughput(lambda: now_s)
    assert throughput.seconds_for(10**9) == UNMEASURED_RETRY_S
    for _ in range(60):
        throughput.add(report(100))
        now_s += 1.0
    assert throughput.seconds_for(1000) == pytest.approx(10.0, rel=0.05)
    assert throughput.seconds_for(0) == MIN_RETRY_S
    assert throughput.seconds_for(10**9) == MAX_RETRY_S
    now_s += 1000.0  # nothing has begun since
    assert throughput.seconds_for(1000) == MAX_RETRY_S


@pytest.mark.anyio
@pytest.mark.parametrize(("status", "code"), [("503", "overloaded"), ("429", "rate_limit_exceeded")])
async def test_over_http_a_refusal_comes_before_tokenising_and_a_place_comes_back(status: str, code: str) -> None:
    gate = asyncio.Event()
    engine = FakeEngine(lambda call: say(gate, "done"))
    settings = {"max_num_seqs": 1, "max_queued_requests": 1, "overload_status": status}
    async with make_client(engine, **settings) as client, asyncio.TaskGroup() as group:
        body = {"prompt": "hi", "stream": True}
        tasks = [group.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        await engine.wait_for_calls(2)
        engine.tokenizer.encode = None  # type: ignore[assignment,method-assign]
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == int(status)
        assert refused.json()["error"]["code"] == code
        assert int(refused.headers["retry-after"]) >= 1
        del engine.tokenizer.encode
        gate.set()
        for task in tasks:
            assert (await task).status_code == 200
        again: httpx.Response = await client.post("/v1/completions", json=body | {"n": 2})
        assert again.status_code == 200
    assert len(engine.calls) == 4


@pytest.mark.anyio
async def test_the_conversation_that_a_response_goes_on_from_counts() -> None:
    gate = asyncio.Event()
    engine = FakeEngine(lambda call: say(gate, "x") if "wait" in call.prompt else say("x"), max_model_len=4096)
    async with make_client(engine, max_queued_tokens=400) as client, asyncio.TaskGroup() as group:
        long = (await client.post("/v1/responses", json={"input": "a" * 1600})).json()["id"]
        waiting = group.create_task(client.post("/v1/responses", json={"input": "wait"}))
        await engine.wait_for_calls(2)
        refused = await client.post("/v1/responses", json={"input": "b", "previous_response_id": long})
        assert refused.status_code == 503, refused.text
        gate.set()
        assert (await waiting).status_code == 200
        again = await client.post("/v1/responses", json={"input": "b", "previous_response_id": long})
        assert again.status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}], ids=["full", "stream", "background"])
async def test_a_responses_place_is_given_back_however_it_ends(how: dict[str, bool]) -> None:
    engine = FakeEngine(lambda call: say(EngineError("it broke")) if "fail" in call.prompt else say("a"))
    async with make_client(engine, max_num_seqs=1, max_queued_requests=0) as client:
        for text in ("fail", "fine", "fail", "fine"):
            answer = await client.post("/v1/responses", json={"input": text} | how)
            assert answer.status_code == (500 if text == "fail" and "background" not in how else 200), answer.text
            if "background" in how:
                await delete_at_end(client, answer.json()["id"])
