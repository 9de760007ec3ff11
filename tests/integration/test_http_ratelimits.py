"""Rate limits over HTTP: who is refused and how, what every answer tells, what is counted in the end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any

import anyio.lowlevel
import httpx
import pytest

from server.metrics import Metrics
from server.ratelimits import HEADERS, RateLimits
from tests.factories_engine import FakeEngine, say
from tests.factories_http import Clock, delete_at_end, make_client
from tests.metrics_factory import PretendEngine

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
}
ROUTES = list(BODIES)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The one that the limits read: it stands still."""
    clock = Clock()
    monkeypatch.setitem(RateLimits.__init__.__kwdefaults__, "clock", clock)
    return clock


def make_engine(script: Any = None) -> FakeEngine:
    return FakeEngine(script, max_model_len=4096)


def told(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("x-ratelimit-")}


def left(response: httpx.Response, unit: str = "tokens") -> int:
    return int(response.headers[f"x-ratelimit-remaining-{unit}"])


def num_total(response: httpx.Response) -> int:
    return int(response.json()["usage"]["total_tokens"])


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
@pytest.mark.parametrize("route", ROUTES)
async def test_every_answer_tells_what_is_left_and_one_too_many_is_429(clock: Clock, route: str, stream: bool) -> None:
    engine = FakeEngine()
    body = BODIES[route] | {"stream": stream}
    async with make_client(engine, requests_per_minute=2, tokens_per_minute=6000) as client:
        first = await client.post(route, json=body)
        assert first.status_code == 200
        assert set(told(first)) == set(HEADERS)
        assert (left(first, "requests"), first.headers["x-ratelimit-limit-requests"]) == (1, "2")
        assert first.headers["x-ratelimit-reset-requests"] == "30s"
        assert 0 < left(first) < 6000
        assert (await client.post(route, json=body)).status_code == 200
        engine.tokenizer.encode = None  # type: ignore[assignment,method-assign]
        clock.s += 0.25
        refused = await client.post(route, json=body)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
        assert "2 requests per minute" in error["message"]
        assert error["message"].endswith("try again in 29.75s")
        assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("30", "29750")
        assert set(told(refused)) == set(HEADERS)
        assert (left(refused, "requests"), refused.headers["x-ratelimit-reset-requests"]) == (0, "59.75s")
        del engine.tokenizer.encode
        clock.s += 29.75
        assert (await client.post(route, json=body)).status_code == 200
    assert len(engine.calls) == 3


@pytest.mark.parametrize("route", ROUTES)
async def test_too_many_tokens_are_429_before_tokenising(clock: Clock, route: str) -> None:
    gate = asyncio.Event()
    engine = make_engine(lambda call: say(gate, "done"))
    async with make_client(engine, tokens_per_minute=600) as client, asyncio.TaskGroup() as group:
        cap = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
        open_one = group.create_task(client.post(route, json=BODIES[route] | {cap: 500}))
        await engine.wait_for_calls(1)
        engine.tokenizer.encode = None  # type: ignore[assignment,method-assign]
        refused = await client.post(route, json=BODIES[route] | {cap: 200})
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        assert "600 tokens per minute" in error["message"]
        assert 0 < int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"])
        assert set(told(refused)) == {name for name in HEADERS if name.endswith("tokens")}
        del engine.tokenizer.encode
        clock.s += int(refused.headers["retry-after-ms"]) / 1000
        gate.set()
        assert (await client.post(route, json=BODIES[route] | {cap: 200})).status_code == 200
        assert (await open_one).status_code == 200


@pytest.mark.parametrize(
    ("route", "more"),
    [
        *((route, {}) for route in ROUTES),
        ("/v1/completions", {"n": 3}),
        ("/v1/completions", {"n": 2, "best_of": 3}),
        ("/v1/completions", {"prompt": ["a", "bcd"], "n": 2}),
        ("/v1/completions", {"prompt": [[65, 66], [67]]}),
        ("/v1/chat/completions", {"n": 2, "max_tokens": None}),
        ("/v1/chat/completions", {"max_completion_tokens": 50}),
        ("/v1/responses", {"max_output_tokens": None}),
    ],
)
async def test_in_the_end_it_is_one_request_and_the_tokens_of_usage(
    clock: Clock, route: str, more: dict[str, Any]
) -> None:
    async with make_client(make_engine(), requests_per_minute=10, tokens_per_minute=1000) as client:
        answer = await client.post(route, json=BODIES[route] | more)
        assert answer.status_code == 200, answer.text
        assert left(answer) == 1000 - num_total(answer)
        assert left(answer, "requests") == 9
        stream = await client.post(route, json=BODIES[route] | more | {"stream": "best_of" not in more})
        assert stream.status_code == 200
        after = await client.post(route, json=BODIES[route] | more)
        assert left(after) == 1000 - 3 * num_total(answer)


async def test_many_choices_reserve_what_each_may_have(clock: Clock) -> None:
    async with make_client(make_engine(), tokens_per_minute=600) as client:
        body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 90}
        passes = await client.post("/v1/completions", json=body)
        assert passes.status_code == 200
        body["max_tokens"] = 101
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 429
        assert "606 that its output may have" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "hi", "max_tokens": 100}, "100 tokens, not counting its prompt"),
        ({"prompt": "h" * 90, "max_tokens": 8}, "91 in its prompt and 8"),
    ],
    ids=["by its output", "by its prompt"],
)
async def test_what_can_never_pass_says_so_and_is_not_to_be_asked_again(
    clock: Clock, body: dict[str, Any], said: str
) -> None:
    engine = make_engine()
    async with make_client(engine, tokens_per_minute=90) as client:
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        assert "too large to pass at any time" in error["message"]
        assert said in error["message"]
        assert "90 tokens per minute" in error["message"]
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        assert left(refused) == 90
    assert engine.calls == []


async def test_what_is_refused_otherwise_counts_as_a_request_and_uses_no_tokens(clock: Clock) -> None:
    bad = [
        ({"prompt": "hi", "temperature": -1}, 400),
        ({"prompt": "hi", "max_tokens": "many"}, 400),
        ({"prompt": "h" * 500}, 400),
        ({"prompt": "hi", "model": "another"}, 404),
    ]
    async with make_client(requests_per_minute=10, tokens_per_minute=1000) as client:
        for i, (body, status) in enumerate(bad):
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == status
            assert (left(answer, "requests"), left(answer)) == (9 - i, 1000)
        broken = await client.post("/v1/completions", content=b"{")
        assert (broken.status_code, left(broken, "requests")) == (400, 5)


async def test_an_overloaded_server_counts_the_request_and_no_tokens(clock: Clock) -> None:
    gate = asyncio.Event()
    engine = FakeEngine(lambda call: say(gate, "done"))
    limits = {"requests_per_minute": 10, "tokens_per_minute": 1000, "max_num_seqs": 1, "max_queued_requests": 0}
    async with make_client(engine, **limits) as client, asyncio.TaskGroup() as group:
        open_one = group.create_task(client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 10}))
        await engine.wait_for_calls(1)
        refused = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 10})
        assert (refused.status_code, left(refused, "requests"), left(refused)) == (503, 8, 1000 - 3 - 10)
        gate.set()
        assert left(await open_one) == 1000 - 3 - 4


async def test_a_key_has_its_own_and_is_in_no_log_and_no_metric(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    metrics = Metrics(PretendEngine())
    keys = ("sk-alice-secret", "sk-bob-secret")
    async with make_client(metrics=metrics, api_key=keys, requests_per_minute=1) as client:
        alice, bob = ({"Authorization": f"Bearer {key}"} for key in keys)
        for _ in range(3):
            stranger = await client.post("/v1/completions", json={"prompt": "hi"})
            assert (stranger.status_code, told(stranger)) == (401, {})
        statuses = [
            (await client.post("/v1/completions", json={"prompt": "hi"}, headers=who)).status_code
            for who in (alice, alice, bob, bob)
        ]
        assert statuses == [200, 429, 200, 429]
        scrape = (await client.get("/metrics", headers=alice)).text
    lines = [record.getMessage() for record in caplog.records if record.name == "server.requestlog"]
    assert [line.split(" in ")[0] for line in lines].count("POST /v1/completions 429") == 2
    assert 'chairlift_requests_rate_limited_total{limit="requests",model_name=' in scrape
    for key in keys:
        for part in (key, hashlib.sha256(key.encode()).hexdigest()[:16]):
            assert part not in caplog.text + scrape


async def test_refusals_are_counted_by_kind(clock: Clock) -> None:
    metrics = Metrics(PretendEngine())
    async with make_client(make_engine(), metrics, requests_per_minute=2, tokens_per_minute=100) as client:
        for max_tokens in (101, 100, 100):
            await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": max_tokens})
        for _ in range(4):
            await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
    scrape = metrics.render()[0].decode()
    counts = {
        line.split('limit="')[1].split('"')[0]: float(line.split()[-1])
        for line in scrape.splitlines()
        if line.startswith("chairlift_requests_rate_limited_total{")
    }
    # 100 with a prompt is too large when tokenised, and has counted as a request by then.
    assert counts == {"requests": 4, "tokens": 0, "too_large": 3}


async def test_a_response_in_the_background_is_charged_at_its_own_end(clock: Clock) -> None:
    gate = asyncio.Event()
    engine = make_engine(say("abcd", gate, "e"))
    async with make_client(engine, requests_per_minute=10, tokens_per_minute=1000) as client:
        body = {"input": "hi", "background": True, "max_output_tokens": 50}
        first = await client.post("/v1/responses", json=body)
        (call,) = await engine.wait_for_calls(1)
        num_prompt = len(call.prompt_token_ids)
        assert (left(first), left(first, "requests")) == (1000 - num_prompt - 50, 9)
        gate.set()
        looked = await client.get(f"/v1/responses/{first.json()['id']}")
        assert told(looked) == {}
        await delete_at_end(client, first.json()["id"])
        gate.clear()
        second = await client.post("/v1/responses", json=body)
        assert left(second) == 1000 - (num_prompt + 5) - (num_prompt + 50)
        await engine.wait_for_calls(2)
        path = f"/v1/responses/{second.json()['id']}"
        while (await client.get(path)).json()["status"] == "queued":
            await anyio.lowlevel.checkpoint()
        await client.post(f"{path}/cancel")
        gate.set()
        third = await client.post("/v1/responses", json=body | {"background": False})
        assert left(third) == 1000 - (num_prompt + 5) - (num_prompt + 4) - (num_prompt + 5)
        assert left(third, "requests") == 7


async def test_only_what_generates_is_limited(clock: Clock) -> None:
    async with make_client(requests_per_minute=1) as client:
        for _ in range(3):
            answer = await client.post("/tokenize", json={"prompt": "hi"})
            assert (answer.status_code, told(answer)) == (200, {})
            assert (await client.get("/v1/models")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        assert (await client.post("/v1/chat/completions", json={"messages": []})).status_code == 429


async def test_without_limits_nothing_is_told() -> None:
    async with make_client() as client:
        for _ in range(3):
            answer = await client.post("/v1/completions", json={"prompt": "hi"})
            assert (answer.status_code, told(answer)) == (200, {})


async def test_web_pages_may_read_them(clock: Clock) -> None:
    page = {"Origin": "https://chat.example.com"}
    async with make_client(cors_allow_origins=("https://chat.example.com",), requests_per_minute=1) as client:
        for status in (200, 429):
            answer = await client.post("/v1/completions", json={"prompt": "hi"}, headers=page)
            assert answer.status_code == status
            exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
            assert {*HEADERS, "retry-after", "retry-after-ms"} <= set(exposed)
            assert set(told(answer)) <= set(exposed)
