"""/v1/responses over the application, by the OpenAI SDK and by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from engine.errors import EngineError
from engine.request import FinishReason
from server.protocol.responses_answer import DeletedResponse, ResponseEvent, ResponseObject
from tests.factories_engine import FakeEngine, say
from tests.factories_http import make_client

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
MODEL = "fake/model"
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


@asynccontextmanager
async def sdk(engine: FakeEngine, key: str = "none", **settings: Any) -> AsyncIterator[AsyncOpenAI]:
    async with make_client(engine, **settings) as http:
        yield AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event, which must be well formed and have the name that it says."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        ResponseEvent.model_validate(events[-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    """What is the same in two responses to one request."""
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name not in ("id", "call_id", *TIMES)}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


TIMES = ("created_at", "completed_at")


async def test_a_text_and_its_stream() -> None:
    async with make_client(FakeEngine(say("Hel", "", "lo", num_cached=3))) as client:
        full = (await client.post(PATH, json={"input": "hi"})).json()
        events = events_of(await client.post(PATH, json={"input": "hi", "stream": True}))
    ResponseObject.model_validate(full)
    assert full["status"] == "completed"
    assert full["output"][0]["content"][0]["text"] == "Hello"
    assert full["usage"] == {
        "input_tokens": len("<user>hi\n<assistant>"),
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len("<user>hi\n<assistant>") + 6,
    }
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert without_ids(events[-1]["response"]) == without_ids(full)
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


async def test_thoughts_text_and_calls_are_items_in_their_order() -> None:
    engine = FakeEngine(say("<think>wh", "y</think>So:", CALL))
    async with make_client(engine, reasoning_parser="think") as client:
        full = (await client.post(PATH, json={"input": "hi", "tools": [TOOL]})).json()
        events = events_of(await client.post(PATH, json={"input": "hi", "tools": [TOOL], "stream": True}))
    ResponseObject.model_validate(full)
    thoughts, message, call = full["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert message["content"][0]["text"] == "So:"
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": "é"})
    assert full["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert without_ids(events[-1]["response"]) == without_ids(full)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.added"] == [0, 1, 2]
    assert "".join(each["delta"] for each in events if each["type"] == "response.reasoning_text.delta") == "why"
    deltas = [each["delta"] for each in events if each["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"]


async def test_the_sdks_stream_helper_puts_it_together() -> None:
    async with (
        sdk(FakeEngine(say("So: ", CALL))) as client,
        client.responses.stream(model=MODEL, input="hi", tools=[TOOL]) as stream,
    ):
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == "So: "
    assert final.output[1].type == "function_call"
    assert json.loads(final.output[1].arguments) == {"a": "é"}


async def test_calls_whose_arguments_come_in_pieces() -> None:
    engine = FakeEngine(say(*f"{CALL}\n{CALL}"))
    async with make_client(engine) as client:
        full = (await client.post(PATH, json={"input": "hi", "tools": [TOOL]})).json()
        events = events_of(await client.post(PATH, json={"input": "hi", "tools": [TOOL], "stream": True}))
    calls = [item for item in full["output"] if item["type"] == "function_call"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"a": "é"}] * 2
    assert len({call["call_id"] for call in calls}) == 2
    assert without_ids(events[-1]["response"]) == without_ids(full)
    pieces: dict[int, str] = {}
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            pieces[event["output_index"]] = pieces.get(event["output_index"], "") + event["delta"]
    assert list(pieces.values()) == [call["arguments"] for call in calls]


async def test_a_call_that_is_cut_off_is_incomplete_and_no_part_of_what_follows() -> None:
    engine = FakeEngine(say(*CALL[:-16], finish=FinishReason.LENGTH), max_model_len=256)
    async with make_client(engine) as client:
        cut = (await client.post(PATH, json={"input": "hi", "tools": [TOOL]})).json()
        goes_on = await client.post(PATH, json={"input": "so?", "previous_response_id": cut["id"]})
    assert cut["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in cut["output"]] == [("function_call", "incomplete")]
    assert goes_on.status_code == 200
    assert [message["role"] for message in engine.tokenizer.chats[-1][0]] == ["user", "user"]


class Point(BaseModel):
    x: int


async def test_the_sdks_parse_helper_asks_for_the_schema() -> None:
    engine = FakeEngine(say('{"x"', ": 3}"))
    async with sdk(engine) as client:
        parsed = await client.responses.parse(model=MODEL, input="hi", text_format=Point)
    assert parsed.output_parsed == Point(x=3)
    grammar = engine.calls[0].params.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


async def test_a_conversation_goes_on_from_its_last_response() -> None:
    engine = FakeEngine(say("Hello"), max_model_len=256)
    async with sdk(engine) as client:
        first = await client.responses.create(model=MODEL, input="one", instructions="Be brief.")
        second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        await client.responses.create(model=MODEL, input="three", previous_response_id=second.id, instructions="New.")
    assert second.previous_response_id == first.id
    assert engine.calls[0].prompt == "<system>Be brief.\n<user>one\n<assistant>"
    assert engine.calls[1].prompt == "<user>one\n<assistant>Hello\n<user>two\n<assistant>"
    assert engine.calls[2].prompt == (
        "<system>New.\n<user>one\n<assistant>Hello\n<user>two\n<assistant>Hello\n<user>three\n<assistant>"
    )


async def test_a_call_and_its_result_go_round() -> None:
    engine = FakeEngine(lambda call: say("It is 7.") if "<tool>" in call.prompt else say(CALL))
    async with sdk(engine) as client:
        question = {"role": "user", "content": "?"}
        called = await client.responses.create(model=MODEL, input=[question], tools=[TOOL], store=False)  # type: ignore[list-item]
        [call] = called.output
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        items: Any = [question, *called.output, result]
        answer = await client.responses.create(model=MODEL, input=items, tools=[TOOL])
    assert answer.output_text == "It is 7."
    messages, _ = engine.tokenizer.chats[-1]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == call.call_id


async def test_the_cap_makes_it_incomplete() -> None:
    async with make_client(FakeEngine(say("Hel", finish=FinishReason.LENGTH))) as client:
        full = (await client.post(PATH, json={"input": "hi", "max_output_tokens": 3})).json()
        events = events_of(await client.post(PATH, json={"input": "hi", "max_output_tokens": 3, "stream": True}))
    assert full["status"] == full["output"][0]["status"] == "incomplete"
    assert full["incomplete_details"] == {"reason": "max_output_tokens"}
    assert full["completed_at"] is None
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(full)


async def test_nothing_said_is_an_empty_message() -> None:
    async with make_client(FakeEngine(say(""))) as client:
        full = (await client.post(PATH, json={"input": "hi"})).json()
    assert full["output"][0]["content"][0]["text"] == ""


async def test_an_error_is_a_status_before_the_first_event_and_an_event_after_it() -> None:
    async with make_client(FakeEngine(say(EngineError("it broke")))) as client:
        early = await client.post(PATH, json={"input": "hi", "stream": True})
    async with make_client(FakeEngine(say("a", EngineError("it broke"), "b"))) as client:
        events = events_of(await client.post(PATH, json={"input": "hi", "stream": True}))
        full = await client.post(PATH, json={"input": "hi"})
    assert early.status_code == full.status_code == 500
    assert full.json()["error"]["message"] == "it broke"
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a"


async def test_what_is_kept_can_be_had_and_dropped() -> None:
    async with make_client() as client:
        made = (await client.post(PATH, json={"input": "hi", "metadata": {"a": "b"}, "user": "me"})).json()
        kept = await client.get(f"{PATH}/{made['id']}")
        dropped = await client.delete(f"{PATH}/{made['id']}")
        gone = await client.get(f"{PATH}/{made['id']}")
        unkept = (await client.post(PATH, json={"input": "hi", "store": False})).json()
        never = await client.get(f"{PATH}/{unkept['id']}")
        goes_on = await client.post(PATH, json={"input": "hi", "previous_response_id": made["id"]})
    assert made["metadata"] == {"a": "b"}
    assert kept.json() == made
    DeletedResponse.model_validate(dropped.json())
    for answer in (gone, never, goes_on):
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert goes_on.json()["error"]["code"] == "previous_response_not_found"


async def test_what_one_key_has_made_is_not_there_for_another() -> None:
    async with make_client(api_key=("a", "b")) as client:
        a, b = ({"Authorization": f"Bearer {key}"} for key in "ab")
        made = (await client.post(PATH, json={"input": "hi"}, headers=a)).json()["id"]
        as_other = [
            await client.get(f"{PATH}/{made}", headers=b),
            await client.delete(f"{PATH}/{made}", headers=b),
            await client.post(f"{PATH}/{made}/cancel", headers=b),
            await client.post(PATH, json={"input": "hi", "previous_response_id": made}, headers=b),
        ]
        own = await client.get(f"{PATH}/{made}", headers=a)
    assert [answer.status_code for answer in as_other] == [404] * 4
    assert own.status_code == 200


async def test_in_the_background_it_is_asked_for_until_it_has_ended() -> None:
    gate = asyncio.Event()
    engine = FakeEngine(say("Hel", gate, "lo"))
    async with sdk(engine) as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True)
        assert made.status == "queued"
        [call] = await engine.wait_for_calls(1)
        running = await client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="hi", previous_response_id=made.id)
        gate.set()
        await call.ended.wait()
        ended = await client.responses.retrieve(made.id)
        cancelled = await client.responses.cancel(made.id)
    assert running.status in ("queued", "in_progress")
    assert caught.value.param == "previous_response_id"
    assert ended.status == "completed"
    assert ended.output_text == "Hello"
    assert cancelled == ended


async def test_cancelling_frees_its_place_and_keeps_what_was_said() -> None:
    never = asyncio.Event()
    engine = FakeEngine(say("Hel", never, "lo"))
    async with sdk(engine) as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True)
        [call] = await engine.wait_for_calls(1)
        assert (await client.responses.retrieve(made.id)).status == "in_progress"
        cancelled = await client.responses.cancel(made.id)
        assert call.ended.is_set()
        assert call.was_aborted
        assert cancelled.status == "cancelled"
        assert cancelled.output_text == "Hel"
        assert await client.responses.retrieve(made.id) == cancelled
        assert await client.responses.cancel(made.id) == cancelled


async def test_cancelling_before_it_has_begun() -> None:
    engine = FakeEngine(say("Hello"))
    async with make_client(engine) as client:
        made = await client.post(PATH, json={"input": "hi", "background": True})
        cancelled = await client.post(f"{PATH}/{made.json()['id']}/cancel")
    assert cancelled.json()["status"] in ("cancelled", "completed")  # as the event loop has it


async def test_one_in_the_background_keeps_its_place_until_it_ends() -> None:
    engine = FakeEngine(say("Hel", asyncio.Event(), "lo"))
    async with make_client(engine, max_num_seqs=1, max_queued_requests=0) as client:
        made = (await client.post(PATH, json={"input": "hi", "background": True})).json()["id"]
        await engine.wait_for_calls(1)
        assert (await client.post(PATH, json={"input": "hi", "background": True})).status_code == 503
        await client.post(f"{PATH}/{made}/cancel")
        assert (await client.post(PATH, json={"input": "hi", "background": True})).status_code == 200


async def test_deleting_ends_it() -> None:
    engine = FakeEngine(say("Hel", asyncio.Event(), "lo"))
    async with make_client(engine) as client:
        made = (await client.post(PATH, json={"input": "hi", "background": True})).json()["id"]
        [call] = await engine.wait_for_calls(1)
        assert (await client.delete(f"{PATH}/{made}")).status_code == 200
        assert call.ended.is_set()
        assert (await client.get(f"{PATH}/{made}")).status_code == 404


async def test_a_failure_in_the_background_is_in_the_response() -> None:
    engine = FakeEngine(say(EngineError("it broke")))
    async with make_client(engine) as client:
        made = (await client.post(PATH, json={"input": "hi", "background": True})).json()["id"]
        [call] = await engine.wait_for_calls(1)
        await call.ended.wait()
        failed = (await client.get(f"{PATH}/{made}")).json()
    ResponseObject.model_validate(failed)
    assert failed["status"] == "failed"
    assert failed["error"]["message"] == "it broke"


async def test_only_what_is_in_the_background_can_be_cancelled() -> None:
    async with make_client() as client:
        made = (await client.post(PATH, json={"input": "hi"})).json()["id"]
        refused = await client.post(f"{PATH}/{made}/cancel")
    assert refused.status_code == 400


async def test_the_oldest_goes_when_there_are_too_many() -> None:
    async with make_client(max_stored_responses=1) as client:
        first = (await client.post(PATH, json={"input": "hi"})).json()["id"]
        second = (await client.post(PATH, json={"input": "hi"})).json()["id"]
        statuses = [(await client.get(f"{PATH}/{each}")).status_code for each in (first, second)]
    assert statuses == [404, 200]


FORMAT = {"type": "json_schema", "name": "n"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"], "content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]},
            "input[0].arguments",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": FORMAT}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"model": "gpt-9"}, "model"),
    ],
)
async def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    async with make_client() as client:
        answer = await client.post(PATH, json={"input": "hi"} | fields)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param
    assert param.rpartition(".")[2].partition("[")[0] in answer.json()["error"]["message"]


async def test_a_conversation_beyond_the_context_is_refused() -> None:
    async with make_client() as client:
        answer = await client.post(PATH, json={"input": "x" * 100})
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


@pytest.mark.parametrize("query", ["stream=true", "include[]=x", "starting_after=3"])
async def test_what_a_get_cannot_do_is_refused(query: str) -> None:
    async with make_client() as client:
        made = (await client.post(PATH, json={"input": "hi"})).json()["id"]
        answer = await client.get(f"{PATH}/{made}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_null_is_the_same_as_leaving_out() -> None:
    nothing = dict.fromkeys(["instructions", "tools", "tool_choice", "text", "reasoning", "store", "top_p", "metadata"])
    async with make_client() as client:
        answer = await client.post(PATH, json={"input": "hi", **nothing, "no_such_field": 1})
    assert answer.json()["status"] == "completed"


async def test_reasoning_effort_is_a_switch_of_the_template_where_it_has_one() -> None:
    engine = FakeEngine()
    engine.tokenizer.chat_template = "{{ reasoning_effort }}"  # type: ignore[misc]
    async with make_client(engine) as client:
        answer = await client.post(PATH, json={"input": "hi", "reasoning": {"effort": "low"}})
    assert answer.json()["reasoning"]["effort"] == "low"
    assert engine.tokenizer.chats[-1][1] == {"reasoning_effort": "low"}


async def test_the_models_own_sampling_defaults_are_said_back() -> None:
    engine = FakeEngine(say("a"), sampling_defaults={"temperature": 0.5, "top_p": 0.9, "top_k": 20})
    async with make_client(engine) as client:
        left_out = (await client.post("/v1/responses", json={"input": "hi"})).json()
        given = (await client.post("/v1/responses", json={"input": "hi", "temperature": 2, "top_p": 1})).json()
    assert (left_out["temperature"], left_out["top_p"]) == (0.5, 0.9)
    assert (given["temperature"], given["top_p"]) == (2, 1)
    assert [call.params.temperature for call in engine.calls] == [0.5, 2]
    assert [call.params.top_k for call in engine.calls] == [20, 20]
