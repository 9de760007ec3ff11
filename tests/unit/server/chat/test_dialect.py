"""What is known of a model's way to answer."""

from __future__ import annotations

from typing import Any, cast, get_args

import pytest

from config.schema import ServerConfig, ToolParser
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from server.chat.conversation import Conversation
from server.chat.dialect import Dialect, offered_tools
from server.chat.tools import FORMATS, detect
from server.protocol.chat import ChatCompletionRequest
from tests.factories_engine import FakeTokenizer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}


def body(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]} | fields)


def test_the_setting_has_every_format() -> None:
    assert set(get_args(ToolParser)) == {"auto", "none", *FORMATS}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example_function_name>", None),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ('Environment: ipython\n{"name": function name, "parameters": dictionary of argument name}', "llama3_json"),
        ('role == "ipython" ... [func_name1(params_name1=params_value1)] "parameters"', "pythonic"),
        ("{{ message.content }}", None),
        ("", None),
    ],
)
def test_the_template_shows_the_format(template: str, name: str | None) -> None:
    assert detect(template) is (FORMATS[name] if name else None)


@pytest.mark.parametrize(
    ("settings", "dialect"),
    [
        (ServerConfig(), Dialect(False, FORMATS["hermes"], True)),
        (ServerConfig(tool_parser="none"), Dialect(shows_tools=True)),
        (ServerConfig(tool_parser="mistral", reasoning_parser="think"), Dialect(True, FORMATS["mistral"], True)),
    ],
)
def test_settings_come_first(settings: ServerConfig, dialect: Dialect) -> None:
    assert Dialect.of(settings, cast(Tokenizer, FakeTokenizer())) == dialect


def test_thoughts_may_be_open_already() -> None:
    tokenizer = FakeTokenizer()

    def is_thinking(prompt: str, dialect: Dialect) -> bool:
        tokens = tokenizer.encode(prompt)
        reading = dialect.reading(body(), tokens, cast(Tokenizer, tokenizer), has_form=False)
        return reading is not None and reading.is_thinking

    assert is_thinking("<think>\n", Dialect(thinks=True))
    assert not is_thinking("<think>\n", Dialect())
    assert not is_thinking("hi", Dialect(thinks=True))


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "auto", "tools": []}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", None),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
            None,
        ),
    ],
)
def test_what_is_refused_names_its_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        Dialect(tool_format=FORMATS["hermes"]).check(body(**fields))
    assert (caught.value.param, caught.value.code) == (param, code)


def test_tools_are_refused_where_no_call_would_be_understood_unless_none_is_wanted() -> None:
    with pytest.raises(RequestError, match="--tool-parser") as caught:
        Dialect().check(body(tools=[TOOL]))
    assert caught.value.param == "tools"
    Dialect().check(body(tools=[TOOL], tool_choice="none"))
    Dialect().check(body(tools=[]))
    Dialect().check(body(tools=[TOOL], tool_choice="required"))


def test_a_template_without_tools_has_them_in_words_and_shows_earlier_calls() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}, "type": "function"}
    part = {"type": "text", "text": "hi"}
    messages = [{"role": "user", "content": [part]}, {"role": "assistant", "tool_calls": [call]}]
    told = Dialect().conversation(Conversation(messages, tools=offered_tools(body(tools=[TOOL]))))
    assert told.tools is None
    words, rest = told.messages[0]["content"]
    assert rest == part
    assert '"name": "f"' in words["text"]
    assert told.messages[1]["content"] == [{"type": "text", "text": '{"name": "f", "arguments": {"a": 1}}'}]
    assert Dialect().conversation(Conversation(messages)).messages == messages
    shown = Conversation(messages, tools=[TOOL])
    assert Dialect(shows_tools=True).conversation(shown) is shown


def test_tools_come_first_also_where_nobody_has_begun() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "Hi!"}]}]
    told = Dialect().conversation(Conversation(messages, tools=[TOOL]))
    assert [message["role"] for message in told.messages] == ["system", "assistant"]


def test_the_template_gets_all_that_it_may_look_for() -> None:
    bare = {"type": "function", "function": {"name": "g"}}
    assert offered_tools(body(tools=[TOOL, bare])) == [
        {"type": "function", "function": {**TOOL["function"], "description": ""}},  # type: ignore[dict-item]
        {
            "type": "function",
            "function": {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    assert offered_tools(body(tools=[TOOL], tool_choice="none")) is None
