"""Lengths that a request may have: what would hold up the event loop, or the engine, is refused before it does.

Without these bounds, ten thousand `{}` in the place of messages take 30 ms,
and the five million that fit into a body 46 s.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.params import MAX_ALLOWED_TOKEN_IDS, MAX_GRAMMAR_LEN, MAX_STOP_LEN, SamplingParams
from engine.text.stop import StopMatcher
from server.body import parse_object
from server.errors import BodyTooLarge
from server.limits import MAX_CHOICES, MAX_DETOKENIZED, MAX_LABEL_LEN, MAX_MARKS, MAX_MESSAGES, MAX_TOOLS, MAX_VALUES
from server.protocol.responses import MessageItem
from server.responses.items import to_messages
from tests.factories_http import make_client

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("piece", [b"[]", b"{}", b'"a":', b"\\u005b[", b'{"":{}}'])
def test_a_body_may_not_be_made_of_brackets(piece: bytes) -> None:
    text = piece * (MAX_MARKS + 1)
    for body in (b'{"x":[' + text, b'{"prompt":"' + text):  # in a text they would be parsed by somebody else
        with pytest.raises(BodyTooLarge, match=f"at most {MAX_MARKS} are read"):
            parse_object(body)


def test_a_text_may_have_many_brackets() -> None:
    text = "f(x)[0] = {a: b}\n" * (MAX_MARKS // 2)
    assert parse_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.body.MAX_VALUES", 1000)


@pytest.mark.usefixtures("few_values")
@pytest.mark.parametrize(
    "value",
    [[0] * 1001, [[[0] * 9] * 10] * 10, {"a": {str(i): 0 for i in range(1000)}}, [{"a": {}}] * 501],
    ids=["numbers", "arrays", "members", "objects"],
)
def test_values_are_counted_through_all_arrays_and_objects(value: Any) -> None:
    with pytest.raises(RequestError, match="tools has too many values") as caught:
        parse_object(json.dumps({"n": 1, "tools": value, "stop": []}).encode())
    assert caught.value.param == "tools"


@pytest.mark.usefixtures("few_values")
def test_values_of_all_fields_are_counted_together() -> None:
    half = [0] * 500
    assert parse_object(json.dumps({"a": half, "b": half}).encode())
    with pytest.raises(RequestError) as caught:
        parse_object(json.dumps({"a": half, "b": half, "c": [0]}).encode())
    assert caught.value.param == "c"


@pytest.mark.parametrize("name", ["prompt", "tokens", "allowed_token_ids"])
def test_token_ids_are_not_counted(name: str) -> None:
    body = {name: [0] * (2 * MAX_VALUES)}
    assert parse_object(json.dumps(body).encode()) == body


def test_a_name_that_is_none_of_ours_is_not_said_back() -> None:
    with pytest.raises(RequestError, match="the body has too many values") as caught:
        parse_object(json.dumps({"x" * 10_000: [0] * (MAX_VALUES + 1)}).encode())
    assert caught.value.param is None


def bad_parts(number: int) -> list[Any]:
    return [{"role": "user", "content": [{}] * number}]


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        ("/v1/chat/completions", {"messages": [USER] * (MAX_MESSAGES + 1)}, "messages", "10000 entries at most"),
        ("/tokenize", {"messages": [USER] * (MAX_MESSAGES + 1)}, "messages", "10000 entries at most"),
        ("/v1/responses", {"input": [USER] * (MAX_MESSAGES + 1)}, "input", "10000 entries at most"),
        ("/v1/chat/completions", {"messages": bad_parts(50_000)}, "messages[0].content[0].type", "required"),
        ("/v1/responses", {"input": bad_parts(50_000)}, "input[0].content[0].type", "required"),
        ("/v1/chat/completions", {"messages": [{}] * MAX_MESSAGES}, "messages[0].role", "required"),
        ("/v1/chat/completions", {"messages": [USER], "tools": [3] * 1000}, "tools[0]", "an object"),
        ("/v1/completions", {"stop": [0] * 50_000}, "stop[0]", "a string"),
        ("/v1/completions", {"stop": "x" * (MAX_STOP_LEN + 1)}, "stop", "at most 4096 characters long"),
        ("/v1/completions", {"stop": ["x" * 300] * 16}, "stop", "at most 4096 characters long, all together"),
        ("/v1/completions", {"stop": [""] * 50_000}, "stop", "at most 16"),
        ("/v1/completions", {"stop_token_ids": [0] * 257}, "stop_token_ids", "at most 256"),
        ("/v1/completions", {"allowed_token_ids": [0] * (MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids", "at most"),
        ("/v1/completions", {"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "at most 1024"),
        ("/v1/completions", {"prompt": [[1]] * (MAX_CHOICES + 1)}, "prompt", "1025 prompts"),
        ("/v1/completions", {"prompt": [""] * 10**6}, "prompt", "1000000 prompts"),
        ("/v1/completions", {"structured_outputs": {"choice": [0] * 50_000}}, "structured_outputs.choice[0]", "string"),
        (
            "/v1/completions",
            {"structured_outputs": {"json": "[" * (MAX_GRAMMAR_LEN + 1)}},
            "structured_outputs.json",
            "characters long",
        ),
        ("/detokenize", {"tokens": [0] * (MAX_DETOKENIZED + 1)}, "tokens", "1000000 entries at most"),
        ("/v1/responses", {"metadata": {str(i): "" for i in range(17)}}, "metadata", "16 entries at most"),
    ],
)
async def test_what_is_too_long_is_refused_by_name(path: str, fields: dict[str, Any], param: str, says: str) -> None:
    async with make_client() as client:
        answer = await client.post(path, json=_needed(path) | fields)
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert len(answer.text) < 1000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/responses"])
async def test_tools_are_bounded(path: str) -> None:
    names = [f"f{i}" for i in range(MAX_TOOLS + 1)]
    flat = path == "/v1/responses"
    tools = [{"type": "function", "name": n} if flat else {"type": "function", "function": {"name": n}} for n in names]
    async with make_client() as client:
        answer = await client.post(path, json={"input" if flat else "messages": [USER], "tools": tools})
    assert answer.json()["error"]["message"] == "tools may have 128 entries at most"


@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_labels_are_bounded(path: str, name: str) -> None:
    async with make_client() as client:
        fits, not_ = [
            await client.post(path, json=_needed(path) | {name: "x" * length})
            for length in (MAX_LABEL_LEN, MAX_LABEL_LEN + 1)
        ]
    assert fits.status_code == 200, fits.text
    assert not_.json()["error"]["message"] == f"{name} may have 1024 characters at most"


def test_a_conversation_is_bounded_with_what_went_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.responses.items.MAX_MESSAGES", 100)
    item = MessageItem.model_validate(USER)
    assert len(to_messages([item] * 99, [item])) == 100
    with pytest.raises(RequestError, match="1 items, and the previous response 100:") as caught:
        to_messages([item] * 100, [item])
    assert caught.value.param == "input"


def test_what_is_generous_is_let_through() -> None:
    SamplingParams(stop=("x" * 256,) * 16, allowed_token_ids=tuple(range(MAX_ALLOWED_TOKEN_IDS)))


def test_choices_share_what_finds_their_stop_strings() -> None:
    a, b, other = (StopMatcher(stops, include_stop_str=False) for stops in (["ab"], ["ab"], ["b"]))
    assert a._automaton is b._automaton
    assert a._automaton is not other._automaton
    assert [a.feed("xa"), b.feed("ya"), a.feed("b"), b.feed("c")] == ["x", "y", "", "ac"]
    assert (a.matched, b.matched) == ("ab", None)


def _needed(path: str) -> dict[str, Any]:
    """What the route cannot do without."""
    needed: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": [USER]},
        "/v1/responses": {"input": "hi"},
    }
    return needed.get(path, {})
