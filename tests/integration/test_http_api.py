"""The HTTP contract, in this process, over an engine that says what the test wants. Names follow API.md's numbers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import EngineDead, EngineError, EngineStopped, Overloaded
from engine.request import FinishReason
from server.limits import MAX_BODY_BYTES
from server.metrics import Metrics
from tests.factories_engine import FakeEngine, say
from tests.factories_http import events_of, make_client

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)]
both_routes = pytest.mark.parametrize(("path", "body"), ROUTES, ids=["completions", "chat"])
both_modes = pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with make_client() as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, in the one shape that errors have."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = body["error"]
    return error


# --- Answers ---


@both_routes
async def test_full_answer_and_stream_say_the_same(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    full = (await client.post(path, json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of(await client.post(path, json=body | options))
    (choice,) = full["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert text == "Hello world"
    assert [piece["text"] if "text" in piece else piece["delta"]["content"] for piece in pieces] == ["Hello", " world"]
    assert last["usage"] == full["usage"]
    assert last["usage"]["completion_tokens"] == len("Hello world")


async def test_02_finish_reason_is_null_until_the_last_chunk_of_each_choice() -> None:
    async with make_client(FakeEngine(say("a", "b", finish=FinishReason.LENGTH))) as client:
        chunks = events_of(await client.post("/v1/completions", json={"prompt": ["x", "y"], "n": 2, "stream": True}))
    for index in range(4):
        reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["index"] == index]
        assert reasons == [None, "length"]


async def test_04_role_comes_once_per_choice_and_usage_only_if_asked_for() -> None:
    async with make_client(FakeEngine(say("a", "b"))) as client:
        chunks = events_of(await client.post("/v1/chat/completions", json=CHAT | {"n": 2, "stream": True}))
    for index in range(2):
        roles = [c["choices"][0]["delta"].get("role") for c in chunks if c["choices"][0]["index"] == index]
        assert roles == ["assistant", None]
    assert all("usage" not in chunk for chunk in chunks)


async def test_04_usage_so_far_in_every_chunk(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hi", "stream": True, "stream_options": options}
    chunks = events_of(await client.post("/v1/completions", json=body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [5, 11, 11]


@both_routes
async def test_04_stream_options_without_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    response = await client.post(path, json=body | {"stream_options": {"include_usage": True}})
    assert response.status_code == 400
    assert error_of(response)["param"] == "stream_options"


async def test_05_an_error_after_the_first_byte_is_one_event() -> None:
    async with make_client(FakeEngine(say("a", EngineError("the logits are not finite")))) as client:
        chunk, error = events_of(await client.post("/v1/completions", json={"prompt": "hi", "stream": True}))
    assert chunk["choices"][0]["text"] == "a"
    assert error["error"]["message"] == "the logits are not finite"


async def test_06_stream_headers(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "hi", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


@both_routes
async def test_prompts_times_n_in_order(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(lambda call: say(f"{call.prompt_token_ids[-1]} {call.params.seed}", num_cached=1))
    many = {"prompt": [[10], [20, 21]], "n": 2, "seed": 5} if path == "/v1/completions" else CHAT | {"n": 4, "seed": 5}
    async with make_client(engine) as client:
        answer = (await client.post(path, json=many)).json()
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0].endswith(" 5")
    assert len(set(texts)) == 4
    if path == "/v1/completions":
        assert [text.split()[0] for text in texts] == ["10", "10", "21", "21"]
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
async def test_every_form_of_prompt(prompt: Any) -> None:
    engine = FakeEngine()
    async with make_client(engine) as client:
        response = await client.post("/v1/completions", json={"prompt": prompt, "add_special_tokens": False})
    assert response.status_code == 200
    assert [call.prompt for call in engine.calls] == ["hi"]


async def test_priority_and_salt_reach_the_engine() -> None:
    engine = FakeEngine()
    async with make_client(engine) as client:
        await client.post("/v1/completions", json={"prompt": "hi", "priority": -1, "cache_salt": "s"})
    assert [(call.priority, call.cache_salt) for call in engine.calls] == [(-1, "s")]


# --- Errors ---


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[]", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}']
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_07_09_bodies_that_are_no_json_object(client: httpx.AsyncClient, path: str, content: bytes) -> None:
    response = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


async def test_07_wrong_method_and_unknown_route(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "use POST" in error_of(response)["message"]
    response = await client.post("/v1/chat/completion", json={})
    assert response.status_code == 404
    assert error_of(response)["code"] == "unknown_url"


@both_modes
@both_routes
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 10**400),
        ("temperature", -1),
        ("temperature", 1e400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 10**9),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**40]),
        ("model", "gpt-4"),
        ("logprobs", 1.5),
        ("top_logprobs", 1),
        ("prompt_logprobs", True),
        ("prompt_logprobs", 99),
        ("return_token_ids", 1),
        ("echo", "yes"),
        ("best_of", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1114112": 1}),
        ("logit_bias", {"1": 100.1}),
        ("logit_bias", {"one": 1}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("min_tokens", -1),
        ("min_tokens", 99),
        ("response_format", "json"),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("bad_words", ["x"]),
    ],
)
async def test_08_one_bad_value_is_named(
    path: str, body: dict[str, Any], field: str, value: object, stream: bool
) -> None:
    engine = FakeEngine()
    async with make_client(engine) as client:
        content = json.dumps(body | {field: value, "stream": stream})
        response = await client.post(path, content=content.replace("Infinity", "1e400"))
    assert response.status_code in (400, 404)
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert field in error["message"] or error["code"] == "invalid_json"
    assert error["param"] == field or error["code"] == "invalid_json"
    assert engine.calls == []


@pytest.mark.parametrize("messages", [[], None, "hi", [{"role": "user"}], [{"role": "nobody", "content": "x"}]])
async def test_08_bad_messages(client: httpx.AsyncClient, messages: Any) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert (error_of(response)["param"] or "").startswith("messages")


async def test_10_the_templates_own_complaint(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": [{"role": "tool", "content": "x"}]})
    assert response.status_code == 400
    assert error_of(response)["message"] == "Conversation roles must alternate"


@both_modes
@both_routes
@pytest.mark.parametrize("length", [64, 10_000])
async def test_11_a_prompt_beyond_the_context(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], length: int, stream: bool
) -> None:
    prompt = {"prompt": "x" * length} if "prompt" in body else {"messages": [{"role": "user", "content": "x" * length}]}
    response = await client.post(path, json=prompt | {"stream": stream})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == next(iter(body))
    assert "64" in error["message"]


@both_modes
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EngineDead("it broke"), 500, "engine_dead"),
        (EngineStopped("told to stop"), 503, "stopping"),
        (EngineError("the logits are not finite"), 500, "engine_error"),
        (Overloaded("too many wait", retry_after_s=2.5), 503, "overloaded"),
        (RuntimeError("nobody thought of this"), 500, "internal_error"),
    ],
)
async def test_what_fails_before_the_first_token_has_a_status(
    failure: Exception, status: int, code: str, stream: bool
) -> None:
    async with make_client(FakeEngine(say(failure))) as client:
        response = await client.post("/v1/completions", json={"prompt": "hi", "stream": stream})
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert "nobody" not in response.text
    assert response.headers["x-request-id"]


async def test_an_error_of_one_choice_ends_the_others() -> None:
    def script(call: Any) -> Any:
        return say("a", EngineError("it broke")) if call.prompt == "a" else say("b", asyncio.Event())

    engine = FakeEngine(script)
    async with make_client(engine) as client:
        body = {"prompt": ["a", "b"], "add_special_tokens": False}
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 500
    assert all(call.ended.is_set() for call in engine.calls)


async def test_a_body_beyond_the_limit(client: httpx.AsyncClient) -> None:
    async def body() -> AsyncIterator[bytes]:  # chunked: it does not say how long it is
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    response = await client.post("/v1/completions", content=body())
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


# --- Around ---


async def test_19_health_answers_while_a_long_prompt_is_tokenised() -> None:
    engine = FakeEngine(max_model_len=100_000)
    is_tokenising, go_on = threading.Event(), threading.Event()
    encode = engine.tokenizer.encode

    def slow_encode(text: str, **options: Any) -> list[int]:
        is_tokenising.set()
        assert go_on.wait(10)
        return encode(text, **options)

    engine.tokenizer.encode = slow_encode  # type: ignore[method-assign]
    async with make_client(engine) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x" * 50_000}))
        await asyncio.to_thread(is_tokenising.wait, 10)
        assert (await client.get("/health")).status_code == 200
        assert not asking.done()
        go_on.set()
        assert (await asking).status_code == 200


async def test_20_two_requests_with_one_id_both_work() -> None:
    async with make_client(FakeEngine()) as client:
        headers = {"X-Request-Id": "same"}
        requests = [client.post("/v1/completions", json={"prompt": "hi"}, headers=headers) for _ in range(2)]
        responses = await asyncio.gather(*requests)
    assert [response.headers["x-request-id"] for response in responses] == ["same", "same"]
    assert [response.status_code for response in responses] == [200, 200]


async def test_22_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("filed\n")
    async with make_client(FakeEngine(), api_key=("set",), api_key_file=str(file)) as client:
        for key, status in (("set", 200), ("filed", 200), ("other", 401), ("", 401)):
            response = await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == status
        response = await client.post("/v1/completions", content=b"{not even json")
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/live", "/ready", "/health"):
            assert (await client.get(path)).status_code == 200
        for path in ("/metrics", "/version", "/docs", "/openapi.json", "/"):
            assert (await client.get(path)).status_code == 401


async def test_models(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("fake/model", "smollm2", 64)
    for path in ("/v1/models/fake/model", "/v1/models/fake%2Fmodel"):
        assert (await client.get(path)).json() == card
    response = await client.get("/v1/models/other")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


async def test_health_tells_whether_the_engine_lives() -> None:
    engine = FakeEngine()
    async with make_client(engine) as client:
        assert [(await client.get(path)).status_code for path in ("/live", "/ready", "/health")] == [200, 200, 200]
        engine.dead = EngineDead("it broke")
        assert [(await client.get(path)).status_code for path in ("/live", "/ready", "/health")] == [200, 503, 503]
        assert "it broke" in error_of(await client.get("/health"))["message"]


async def test_version_and_welcome(client: httpx.AsyncClient) -> None:
    version = (await client.get("/version")).json()
    assert version["model"] == "fake/model"
    assert version["kernels"] == "fake"
    assert version["torch"][0].isdigit()
    assert (await client.get("/")).json()["documentation"] == "/docs"
    assert (await client.get("/docs")).status_code == 200


async def test_metrics_count_refused_requests_and_answers() -> None:
    engine = FakeEngine()
    async with make_client(engine) as client:
        await client.post("/v1/completions", json={"prompt": "hi", "n": 0})
        await client.post("/v1/completions", json={"prompt": "hi"})
        await client.get("/v1/models/other")
        text = (await client.get("/metrics")).text
    assert 'chairlift_requests_rejected_total{model_name="fake/model",reason="invalid_value"} 1.0' in text
    assert 'route="/v1/completions",status="400"} 1.0' in text
    assert 'route="/v1/completions",status="200"} 1.0' in text
    assert 'reason="model_not_found"} 1.0' not in text  # a look at the models is no request to generate
    assert [observer.__qualname__ for observer in engine.observers].count("Metrics.on_report") == 1


async def test_metrics_may_be_given() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)
    async with make_client(engine, metrics) as client:
        metrics.rejected("seen")
        assert 'reason="seen"' in (await client.get("/metrics")).text


async def test_logs_hold_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with make_client(FakeEngine(say("ok", RuntimeError("a fault")))) as client:
        for body in ({"prompt": "my secret"}, {"prompt": "my secret", "max_tokens": "x"}, {"prompt": ["my secret", 1]}):
            await client.post("/v1/completions", json=body)
    assert "a fault" in caplog.text
    assert "my secret" not in caplog.text


async def test_07_another_method_is_told_all_that_there_are(client: httpx.AsyncClient) -> None:
    response = await client.patch("/v1/responses/some")
    assert response.status_code == 405
    assert response.headers["allow"] == "DELETE, GET"
    assert "use DELETE, GET." in error_of(response)["message"]
