"""API messages as chat templates want them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import RequestError
from server.chat.messages import to_template
from server.protocol.chat import ChatMessage


def convert(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return to_template([ChatMessage.model_validate(message) for message in messages])


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_is_a_list_of_parts_in_every_role(role: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert convert({"role": role, "content": parts}) == [{"role": role, "content": parts}]
    assert convert({"role": role, "content": "a"}) == [{"role": role, "content": parts[:1]}]


def test_developer_is_the_newer_name_of_system() -> None:
    assert convert({"role": "developer", "content": "a"})[0]["role"] == "system"


def test_absent_and_null_fields_are_not_there() -> None:
    message = {"role": "assistant", "content": "a", "name": None, "tool_calls": None, "refusal": None, "audio": None}
    assert set(convert(message)[0]) == {"role", "content"}


def test_an_assistant_may_have_said_nothing_but_called() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    assistant, tool = convert({"role": "assistant", "content": None, "tool_calls": [call]}, result)
    assert assistant == {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}],
    }
    assert tool["tool_call_id"] == "1"


@pytest.mark.parametrize("arguments", ["", "[]", "{", "1", "[" * 100_000])
def test_arguments_must_be_an_object(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError) as caught:
        convert({"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]})
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_a_user_with_tool_calls_still_needs_content() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(RequestError) as caught:
        convert({"role": "user", "tool_calls": [call]})
    assert caught.value.param == "messages[0].content"
