"""Items become the messages that chat templates are written for."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import RequestError
from server.responses.items import parse_items, to_messages

USER = {"role": "user", "content": "hi"}
THOUGHTS = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def result(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": [{"type": "input_text", "text": "7"}]}


def messages(*items: dict[str, Any]) -> list[tuple[str, str | None, list[str], str | None]]:
    """Role, text, ids of calls and thoughts of each message."""
    return [
        (
            each.role,
            None if each.content is None else "|".join(part.text for part in each.content),
            [made.id or "" for made in each.tool_calls or ()],
            each.reasoning_content,
        )
        for each in to_messages([], parse_items(items))
    ]


def test_one_turn_of_the_model_is_one_message() -> None:
    assert messages(USER, THOUGHTS, said("So:"), call("1"), call("2"), result("1"), result("2")) == [
        ("user", "hi", [], None),
        ("assistant", "So:", ["1", "2"], "hm"),
        ("tool", "7", [], None),
        ("tool", "7", [], None),
    ]


def test_calls_alone_have_no_text() -> None:
    assert messages(USER, call("1"), result("1"))[1] == ("assistant", None, ["1"], None)


def test_text_or_thoughts_after_a_call_begin_a_message() -> None:
    assert messages(call("1"), said("b")) == [("assistant", None, ["1"], None), ("assistant", "b", [], None)]
    assert messages(said("a"), THOUGHTS, said("b")) == [("assistant", "a", [], None), ("assistant", "b", [], "hm")]


def test_an_empty_text_is_a_message_and_thoughts_alone_are_none() -> None:
    assert messages(said(""), USER) == [("assistant", "", [], None), ("user", "hi", [], None)]
    assert messages(THOUGHTS, USER) == [("user", "hi", [], None)]


def test_a_result_may_be_of_a_call_before() -> None:
    earlier = parse_items([call("1")])
    assert [each.role for each in to_messages(earlier, parse_items([result("1")]))] == ["assistant", "tool"]
    with pytest.raises(RequestError) as caught:
        to_messages(earlier, parse_items([USER, result("2")]))
    assert caught.value.param == "input[1].call_id"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "message", "role": "user", "content": None},
        {"type": "computer_call"},
    ],
)
def test_what_an_item_cannot_be_is_refused(item: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_items([item])
    assert (caught.value.param or "").startswith("input[0].")
