"""1 to 6: streams."""

from __future__ import annotations

import json

import pytest

from tests.conformance.api import BODIES, CHAT, COMPLETIONS, Api, Json, error_in, error_of

PROMPTS = {
    "text": "The three largest cities of France are",
    "emoji": "Repeat: 😀 🚀 👩‍👩‍👧 é ü ñ\nRepeat: 😀 🚀 👩‍👩‍👧 é ü ñ\nRepeat:",
    "chinese": "今天天气很好，我们去公园散步。今天天气很好，我们去公园散步。今天天气",
    "code": "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n",
    "spaces": "a  b   c    d\n\n\n\te  f",
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_01_joined_deltas_are_the_full_text_and_no_character_is_torn(api: Api, prompt: str) -> None:
    full, stream = api.complete(prompt, max_tokens=40), api.complete(prompt, max_tokens=40, stream=True)
    assert stream.text == full.text
    assert "\ufffd" not in "".join(stream.choices[0].pieces[:-1])


def test_01_text_without_spaces_streams_as_it_comes(api: Api) -> None:
    stream = api.complete(PROMPTS["chinese"], max_tokens=40, stream=True)
    assert len([piece for piece in stream.choices[0].pieces if piece]) >= 5


COUNTING = "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9\nCount: 1, 2, 3,"


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_02_length_at_the_cap_once_per_choice(api: Api, route: str, stream: bool) -> None:
    # Nearly greedy: no choice ends before its fifth token by chance.
    answer = getattr(api, route)(COUNTING, max_tokens=5, n=2, stream=stream, temperature=0.1)
    assert {index: choice.finish_reasons for index, choice in answer.choices.items()} == {0: ["length"], 1: ["length"]}


def test_02_finish_reason_is_null_until_the_last_chunk(api: Api) -> None:
    chunks = api.chat("Count to ten.", max_tokens=8, stream=True).chunks
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert set(reasons[:-1]) == {None}
    assert reasons[-1] == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
def test_02_end_of_text_is_stop_and_not_in_the_content(api: Api, stream: bool) -> None:
    answer = api.chat("Say hello in one word.", max_tokens=200, stream=stream)
    assert answer.finish_reason == "stop"
    assert "<|" not in answer.text


STOPS = {
    "one token": [" 5"],
    "within tokens": ["4,"],
    "across tokens": [", 6, 7"],
    "one a prefix of another": [", 6, 99", ", 6"],
    "in the prompt only": ["Count"],
    "never": ["zebra"],
}


@pytest.fixture(scope="module")
def uncut(api: Api) -> str:
    """Without stop strings."""
    return api.complete(COUNTING, max_tokens=24).text


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS.keys())
def test_03_text_is_cut_before_the_first_stop_string(api: Api, uncut: str, stop: list[str]) -> None:
    places = [uncut.find(each) for each in stop if each in uncut]
    for stream in (False, True):
        answer = api.complete(COUNTING, max_tokens=24, stop=stop, stream=stream)
        assert answer.text == (uncut[: min(places)] if places else uncut)
        assert answer.finish_reason == ("stop" if places else "length")


def test_03_what_was_held_back_is_flushed_at_the_end(api: Api) -> None:
    uncut = api.complete(COUNTING, max_tokens=6).text
    stop = uncut[-3:] + "zebra"  # begins where the text ends
    for stream in (False, True):
        assert api.complete(COUNTING, max_tokens=6, stop=[stop], stream=stream).text == uncut


def test_04_role_comes_first_and_once_for_each_index(api: Api) -> None:
    answer = api.chat("Hi", max_tokens=4, n=3, temperature=1, stream=True)
    assert {index: choice.roles for index, choice in answer.choices.items()} == {i: ["assistant"] for i in range(3)}
    first = {}
    for chunk in answer.chunks:
        for choice in chunk["choices"]:
            first.setdefault(choice["index"], choice["delta"])
    assert all(delta.get("role") == "assistant" for delta in first.values())


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_04_usage_comes_in_one_chunk_behind_all_others_and_only_if_asked_for(api: Api, route: str) -> None:
    ask = getattr(api, route)
    full = ask("Hi", max_tokens=4)
    stream = ask("Hi", max_tokens=4, stream=True, stream_options={"include_usage": True})
    assert stream.chunks[-1]["choices"] == []
    assert [bool(chunk.get("usage")) for chunk in stream.chunks] == [False] * (len(stream.chunks) - 1) + [True]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert stream.usages[0][count] == full.usages[0][count]
    assert ask("Hi", max_tokens=4, stream=True).usages == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_04_stream_options_need_stream(api: Api, path: str) -> None:
    error = error_of(api.post(path, BODIES[path] | {"max_tokens": 2, "stream_options": {"include_usage": True}}))
    assert "stream_options" in (error["param"] or "") + error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_05_what_is_wrong_before_the_first_byte_is_a_status(api: Api, path: str) -> None:
    response = api.post(path, BODIES[path] | {"max_tokens": 2, "stream": True, "temperature": -1})
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")


def prompt_that_fails(api: Api, path: str, token: int) -> Json:
    """A body whose prompt begins with this token."""
    if path == COMPLETIONS:
        return {"prompt": [token, token]}
    text = api.post("/detokenize", {"tokens": [token]}).json()["prompt"]
    chat = {"messages": [{"role": "user", "content": text}]}
    ids = api.post("/tokenize", chat).json()["tokens"]
    return chat | {"truncate_prompt_tokens": len(ids) - ids.index(token)}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_05_a_fault_after_the_first_byte_is_one_event_and_before_it_a_status(
    api: Api, faulty_tokens: dict[str, int], path: str
) -> None:
    body = prompt_that_fails(api, path, faulty_tokens[path])
    body |= {"model": api.model, "stream": True, "max_tokens": 50, "ignore_eos": True}
    with api.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        *chunks, error, done = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert done == "data: [DONE]"
    assert error_in(json.loads(error.removeprefix("data: ")))["type"] == "server_error"
    choices = [choice for chunk in chunks for choice in json.loads(chunk.removeprefix("data: "))["choices"]]
    assert choices
    assert {choice["finish_reason"] for choice in choices} == {None}
    for stream in (True, False):  # it fails at once now
        response = api.post(path, body | {"stream": stream})
        assert response.status_code == 500
        assert error_in(response.json())["type"] == "server_error"
    assert api.complete("Hi", max_tokens=2).finish_reason == "length"


def test_06_framing(api: Api) -> None:
    answer = api.chat("Hi", max_tokens=4, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "no-cache" in answer.headers.get("cache-control", "") or not api.is_ours  # no POST is cached anyway
    lines = [line.rstrip("\r") for line in answer.lines if line.strip()]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        assert line.startswith((":", "data: ")), line
        if line.startswith("data: "):
            json.loads(line.removeprefix("data: "))
