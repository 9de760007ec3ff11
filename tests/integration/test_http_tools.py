"""Chats with tools and thoughts over HTTP; streams as the OpenAI SDK puts them together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from engine.params import GrammarSpec
from engine.request import FinishReason
from tests.factories_engine import FakeEngine, FakeTokenizer, say
from tests.factories_http import events_of, make_client

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
PATH = "/v1/chat/completions"


async def test_a_call_in_full_and_as_a_stream() -> None:
    engine = FakeEngine(say(*f"Well. {CALL}\n{CALL}"))
    async with make_client(engine) as client:
        full = (await client.post(PATH, json=CHAT)).json()["choices"][0]
        events = events_of(await client.post(PATH, json=CHAT | {"stream": True}))
    assert full["finish_reason"] == "tool_calls"
    assert full["message"]["content"] == "Well. "
    calls = full["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"a": "é"}'}] * 2
    assert len({call["id"] for call in calls}) == 2
    assert [tool["function"]["name"] for tool in engine.tokenizer.tools or ()] == ["f"]

    state = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    choice = state.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well. "
    assert [(call.type, call.function.name) for call in choice.message.tool_calls or ()] == [("function", "f")] * 2
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls or ()] == [{"a": "é"}] * 2


async def test_a_message_with_calls_only_has_no_content() -> None:
    async with make_client(FakeEngine(say(CALL))) as client:
        message = (await client.post(PATH, json=CHAT)).json()["choices"][0]["message"]
        (chunk,) = events_of(await client.post(PATH, json=CHAT | {"stream": True}))
    assert message["content"] is None
    assert set(chunk["choices"][0]["delta"]) == {"role", "tool_calls"}


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
async def test_without_tools_to_call_the_text_is_content(fields: dict[str, Any]) -> None:
    engine = FakeEngine(say(CALL))
    async with make_client(engine) as client:
        choice = (await client.post(PATH, json=CHAT | fields)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert engine.tokenizer.tools is None


@pytest.mark.parametrize("template", ["<tool_call> tools", ""], ids=["tools", "no tools"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_forced_call_is_what_the_engine_is_held_to(
    monkeypatch: pytest.MonkeyPatch, template: str, choice: str | dict[str, Any]
) -> None:
    monkeypatch.setattr(FakeTokenizer, "chat_template", template)
    engine = FakeEngine(say(*'{"name": "f", "arguments": {"a": "é"}}'), max_model_len=1024)
    async with make_client(engine) as client:
        body = CHAT | {"tool_choice": choice, "response_format": {"type": "json_object"}}
        full = (await client.post(PATH, json=body)).json()["choices"][0]
    assert full["finish_reason"] == "tool_calls"
    assert full["message"]["content"] is None
    (call,) = full["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": "é"}'}
    grammar = engine.calls[0].params.grammar
    assert grammar == GrammarSpec.calls(
        {"f": {"type": "object", "additionalProperties": False}}, max_calls=8 if choice == "required" else 1
    )
    assert ("You can call functions" in engine.calls[0].prompt) == (template == "")


@pytest.mark.parametrize(("finish", "reason"), [(FinishReason.LENGTH, "length"), (FinishReason.STOP, "stop")])
async def test_a_call_that_is_cut_off_is_told_as_far_as_it_goes(finish: FinishReason, reason: str) -> None:
    engine = FakeEngine(say(CALL[:-20], finish=finish))
    async with make_client(engine) as client:
        choice = (await client.post(PATH, json=CHAT)).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a"'}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == reason


async def test_thoughts_in_full_and_as_a_stream() -> None:
    engine = FakeEngine(say(*"<think>Hm.</think>Yes."))
    body = {"messages": CHAT["messages"]}
    async with make_client(engine, reasoning_parser="think") as client:
        full = (await client.post(PATH, json=body)).json()["choices"][0]["message"]
        events = events_of(await client.post(PATH, json=body | {"stream": True}))
    assert full == {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "Hm."}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


async def test_a_conversation_that_has_called_tools_goes_on() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    engine = FakeEngine()
    async with make_client(engine) as client:
        assert (await client.post(PATH, json={"messages": messages, "tools": TOOLS})).status_code == 200
    seen, _ = engine.tokenizer.chats[0]
    assert seen[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert seen[2]["tool_call_id"] == "call_1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS * 129}, "tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
async def test_what_is_refused_names_its_field(fields: dict[str, Any], param: str) -> None:
    async with make_client() as client:
        response = await client.post(PATH, json=CHAT | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
