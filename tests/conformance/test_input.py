"""7 to 12: what is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.api import BODIES, CHAT, COMPLETIONS, GOOD, Api, Json, error_of

both_routes = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def is_named(error: Json, name: str) -> bool:
    """Whether a refusal leads to this field."""
    return name in f"{error['param'] or ''} {error['message']}".lower()


def body_of(api: Api, path: str, **fields: Any) -> Json:
    """The least body of this route, and these fields."""
    return {"model": api.model, "max_tokens": 2} | BODIES[path] | fields


BROKEN = {
    "nothing": b"",
    "half": b'{"model": ',
    "null": b"null",
    "array": b"[]",
    "string": b'"x"',
    "bytes": b"\xff\xfe{",
    "deep": b"[" * 100_000,
}


@both_routes
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_07_broken_bodies_are_400(api: Api, path: str, content: bytes) -> None:
    response = api.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


@both_routes
def test_07_other_methods_are_405_and_other_paths_404(api: Api, path: str) -> None:
    assert api.http.get(path).status_code == 405
    error_of(api.http.get(path))
    assert api.http.post(path + "/nothing", json={}).status_code == 404
    error_of(api.http.post(path + "/nothing", json={}))


@both_routes
@pytest.mark.parametrize("body", [{"temperature": -1}, {"temperature": {}}, {"model": "no-such-model"}], ids=str)
def test_07_errors_say_all_four_members(api: Api, path: str, body: Json) -> None:
    """Clients read `param` and `code`, be they null."""
    error = api.http.post(path, json=body_of(api, path) | body).json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["code"] is None or isinstance(error["code"], str)


BAD_VALUES: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 10**9),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("temperature", -0.1),
    ("top_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("max_tokens", -1),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"999999999": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}),
]
"""By OpenAI's reference."""

BAD_VALUES_OF_VLLM: list[tuple[str, Any]] = [
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**9]),
    ("min_tokens", -1),
    ("truncate_prompt_tokens", -2),
    ("priority", 10**30),
    ("timeout_ms", 0),
    ("timeout_ms", 10**30),
]
"""Of fields that OpenAI does not have: only a server that takes the field can be asked for its range."""

BAD_VALUES_OF_OURS: list[tuple[str, Any]] = [
    ("top_p", 0),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
]
"""Another server may give them a meaning."""


@both_routes
@pytest.mark.parametrize(
    ("name", "value"), BAD_VALUES + BAD_VALUES_OF_VLLM + BAD_VALUES_OF_OURS, ids=lambda value: str(value)[:20]
)
def test_08_values_out_of_range_are_400_by_name(api: Api, path: str, name: str, value: Any) -> None:
    if not api.is_ours:
        if (name, value) in BAD_VALUES_OF_OURS:
            pytest.skip("no fault of another server's")
        if name in GOOD and not api.takes(path, name):
            pytest.skip(f"the server has no {name}")
    response = api.http.post(
        path,
        content=json.dumps(body_of(api, path, **{name: value})),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400, response.text
    assert is_named(error_of(response), name)


@both_routes
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_08_numbers_that_are_not_finite_are_400(api: Api, path: str, number: str) -> None:
    content = json.dumps(body_of(api, path, temperature="X")).replace('"X"', number)
    response = api.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = error_of(response)
    # NaN and Infinity are no JSON: then the place is named, if not the field
    assert is_named(error, "temperature") or "column" in error["message"] or not api.is_ours


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [-1], [10**9], [1.5], [[1], "x"], {"a": 1}, 5], ids=str)
def test_08_prompts_that_are_none(api: Api, prompt: Any) -> None:
    response = api.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    if not api.is_ours and prompt in ("", [""], [[1], "x"]) and response.status_code == 200:
        pytest.skip("the server begins an empty text for it, or takes texts and ids together")
    assert response.status_code == 400
    assert is_named(error_of(response), "prompt")


@pytest.mark.parametrize(
    "messages", [[], None, "hi", [1], [{}], [{"role": "user"}], [{"role": 1, "content": "x"}]], ids=str
)
def test_08_messages_that_are_none(api: Api, messages: Any) -> None:
    response = api.post(CHAT, {"messages": messages, "max_tokens": 2})
    assert response.status_code == 400
    assert any(is_named(error_of(response), name) for name in ("messages", "role", "content"))


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
@both_routes
def test_09_lone_surrogates_are_400(api: Api, path: str, stream: bool) -> None:
    content = json.dumps(body_of(api, path, stream=stream))
    content = content.replace('"Hi"', r'"\ud83d"')  # escaped, as some clients send half an emoji
    response = api.http.post(path, content=content, headers={"content-type": "application/json"})
    if response.status_code == 200 and not api.is_ours:
        return  # it is JSON, though no Unicode: another server may read U+FFFD
    assert response.status_code == 400
    error_of(response)


@both_routes
def test_09_invalid_utf8_is_400(api: Api, path: str) -> None:
    content = json.dumps(body_of(api, path)).encode().replace(b"Hi", b"\xc3\x28")
    response = api.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_10_content_may_be_a_list_of_text_parts_in_every_role(api: Api, role: str) -> None:
    def ask(content: Any) -> str:
        turns = [{"role": role, "content": content}, {"role": "user", "content": "Go on."}]
        return api.chat(turns, max_tokens=8).text

    parts = [{"type": "text", "text": "You are"}, {"type": "text", "text": "a dog."}]
    assert ask(parts) in (ask("You are\na dog."), ask("You area dog."))  # servers join them in one of these ways


def test_10_other_parts_are_400(api: Api) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    response = api.post(CHAT, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2})
    assert response.status_code == 400
    error_of(response)


def test_10_content_may_be_null_beside_tool_calls(api: Api) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    assert api.chat(turns, max_tokens=4).finish_reason == "length"


def test_11_prompts_beyond_the_context_are_400_with_both_numbers(api: Api) -> None:
    limit = api.context_len()
    if limit is None:
        pytest.skip("/v1/models does not say how long the context is")
    response = api.post(COMPLETIONS, {"prompt": [1] * (limit + 5), "max_tokens": 1})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert str(limit) in error["message"].replace(",", "")
    response = api.post(COMPLETIONS, {"prompt": [1] * 10, "max_tokens": limit})
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


def test_11_max_tokens_left_out_is_16_for_completions(api: Api) -> None:
    answer = api.complete("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,")
    assert answer.usages[0]["completion_tokens"] == 16


def test_11_max_completion_tokens_wins(api: Api) -> None:
    assert api.chat("Count to 100.", max_tokens=9, max_completion_tokens=3).usages[0]["completion_tokens"] == 3


@pytest.mark.parametrize("num_prompts", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_12_many_that_are_longer_than_half_the_context_all_finish(api: Api, num_prompts: int) -> None:
    prompts = [[17 + i] + [100 + i] * 600 for i in range(num_prompts)]
    answer = api.complete(prompts, max_tokens=2)
    assert [answer.choices[i].finish_reasons for i in range(num_prompts)] == [["length"]] * num_prompts
