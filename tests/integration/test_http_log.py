"""The one line that each request gets, through the whole application."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from engine.errors import EngineError
from engine.request import FinishReason
from tests.factories_engine import FakeEngine, say
from tests.factories_http import delete_at_end, make_client

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "a secret question"}]}


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    for chatty in ("httpx", "httpcore", "sse_starlette"):  # as `configure_logging` has it
        caplog.set_level(logging.WARNING, chatty)
    caplog.set_level(logging.DEBUG)


def fields_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == "server.requestlog"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
async def test_what_was_generated(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    engine = FakeEngine(say("ab", "c", finish=FinishReason.LENGTH, num_cached=2))
    async with make_client(engine) as client:
        await client.post("/v1/completions?key=hush", json={"prompt": "hello", "n": 2, "stream": stream})
    (fields,) = fields_of(caplog)
    assert fields.pop("total_s") >= fields.pop("ttft_s") >= 0
    assert fields == {
        "method": "POST",
        "path": "/v1/completions",
        "client": "127.0.0.1",
        "status": 200,
        "complete": True,
        "queue_s": None,
        "prompt_tokens": 6,
        "cached_tokens": 2,
        "output_tokens": 6,
        "finish_reasons": ("length", "length"),
    }
    assert "POST /v1/completions 200 in 0." in caplog.text
    assert "6 + 6 tokens (2 cached), length\n" in caplog.text
    assert "hush" not in caplog.text


async def test_a_stream_that_breaks_says_how_far_it_came(caplog: pytest.LogCaptureFixture) -> None:
    async with make_client(FakeEngine(say("a", EngineError("it broke")))) as client:
        await client.post("/v1/completions", json={"prompt": "hi", "stream": True})
    (fields,) = fields_of(caplog)
    assert (fields["output_tokens"], fields["finish_reasons"]) == (1, ())


async def test_refusals_and_unknown_paths(caplog: pytest.LogCaptureFixture) -> None:
    async with make_client(api_key=("sk-hush",)) as client:
        await client.post("/v1/completions", json=CHAT)
        headers = {"Authorization": "Bearer sk-hush"}
        await client.post("/v1/completions", json={"prompt": 5}, headers=headers)
        await client.get("/a%0AINFO%20forged", headers=headers)
    assert [fields["status"] for fields in fields_of(caplog)] == [401, 400, 404]
    assert "\nINFO forged" not in caplog.text
    assert "/a%0AINFO%20forged" in caplog.text
    assert "sk-hush" not in caplog.text


async def test_probes_and_scrapes_have_none(caplog: pytest.LogCaptureFixture) -> None:
    async with make_client() as client:
        for path in ("/live", "/ready", "/health", "/metrics", "/health?x=1"):
            await client.get(path)
    assert fields_of(caplog) == []


async def test_prompts_are_logged_only_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async with make_client() as client:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json=CHAT | {"temperature": "a secret question"})
    assert "secret" not in caplog.text
    async with make_client(log_prompts=True) as client:
        await client.post("/v1/chat/completions", json=CHAT)
    assert "prompt: '<user>a secret question\\n<assistant>'" in caplog.text


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
async def test_what_a_response_came_to(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    engine = FakeEngine(say("ab", "c", finish=FinishReason.LENGTH, num_cached=2))
    async with make_client(engine) as client:
        await client.post("/v1/responses", json={"input": "hi", "stream": stream})
    (fields,) = fields_of(caplog)
    assert fields["total_s"] >= fields["ttft_s"] >= 0
    assert (fields["path"], fields["status"], fields["complete"]) == ("/v1/responses", 200, True)
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["output_tokens"]) == (20, 2, 3)
    assert fields["finish_reasons"] == ("length",)


async def test_a_response_that_breaks_says_how_far_it_came(caplog: pytest.LogCaptureFixture) -> None:
    async with make_client(FakeEngine(say("a", EngineError("it broke")))) as client:
        await client.post("/v1/responses", json={"input": "hi"})
    (fields,) = fields_of(caplog)
    assert (fields["status"], fields["output_tokens"], fields["finish_reasons"]) == (500, 1, ())


async def test_one_in_the_background_has_a_line_at_its_own_end(caplog: pytest.LogCaptureFixture) -> None:
    gate = asyncio.Event()
    engine = FakeEngine(say("ab", gate, "c"))
    async with make_client(engine) as client:
        body = {"input": "hi", "background": True}
        answer = await client.post("/v1/responses", json=body, headers={"X-Request-Id": "mine"})
        assert [fields.get("output_tokens") for fields in fields_of(caplog)] == [None]
        cut = (await client.post("/v1/responses", json=body)).json()["id"]
        calls = await engine.wait_for_calls(2)
        await client.post(f"/v1/responses/{cut}/cancel")
        gate.set()
        await calls[0].ended.wait()
        await delete_at_end(client, answer.json()["id"])
    by_id = {fields["response"]: fields for fields in fields_of(caplog) if "response" in fields}
    whole = by_id[answer.json()["id"]]
    assert (whole["complete"], whole["output_tokens"], whole["finish_reasons"]) == (True, 3, ("stop",))
    assert by_id[cut]["complete"] is False
    assert f"background response {cut} in 0." in caplog.text
