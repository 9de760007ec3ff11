"""/v1/responses by OpenAI's own SDK against the real process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.e2e.process import Daemon, wait_until

MODEL = "smollm2"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=60.0) as sdk:
        yield sdk


def test_a_response_knows_the_capital_and_is_kept(client: OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        instructions="Answer in one sentence.",
        input="What is the capital of France?",
        temperature=0,
        max_output_tokens=32,
    )
    assert "Paris" in response.output_text
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_stream_is_the_whole_in_pieces(client: OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="Say hello.", temperature=0, max_output_tokens=24)
    events = list(
        client.responses.create(model=MODEL, input="Say hello.", temperature=0, max_output_tokens=24, stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) > 1
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_the_stream_helper_and_the_previous_response(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="I am Alice.", temperature=0, max_output_tokens=24)
    with client.responses.stream(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0, max_output_tokens=200
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text
    turns: Any = [
        {"role": "user", "content": "I am Alice."},
        *first.output,
        {"role": "user", "content": "What is my name?"},
    ]
    by_hand = client.responses.create(model=MODEL, input=turns, temperature=0, max_output_tokens=200)
    assert by_hand.output_text == text
    assert by_hand.usage is not None
    assert final.usage is not None
    assert by_hand.usage.input_tokens == final.usage.input_tokens


class Person(BaseModel):
    name: str
    age: int


def test_a_model_is_parsed(client: OpenAI) -> None:
    response = client.responses.parse(
        model=MODEL,
        input="Ann is 7 years old. Give name and age as JSON.",
        text_format=Person,
        temperature=0,
        max_output_tokens=64,
    )
    assert isinstance(response.output_parsed, Person)


def test_a_forced_call_and_its_result(client: OpenAI) -> None:
    called = client.responses.create(
        model=MODEL,
        input="How is the weather in Paris?",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
        temperature=0,
    )
    [call] = called.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo")
    answer = client.responses.create(
        model=MODEL,
        previous_response_id=called.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 20 degrees"}],
        temperature=0,
        max_output_tokens=32,
    )
    assert answer.output_text


def test_the_cap_and_bad_fields(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Count to a hundred.", temperature=0, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="hi", tools=[{"type": "web_search"}])
    assert caught.value.param == "tools[0].type"


ENDLESS: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "max_output_tokens": 4000}


def test_a_background_response_ends_by_itself_or_by_cancel(daemon: Daemon, client: OpenAI) -> None:
    short = client.responses.create(model=MODEL, input="Say hello.", background=True, max_output_tokens=8)
    assert short.status == "queued"
    done = ("completed", "incomplete")
    wait_until(lambda: client.responses.retrieve(short.id).status in done, 30.0, "it has not ended")

    endless = client.responses.create(model=MODEL, input="Say hello.", background=True, **ENDLESS)
    wait_until(lambda: client.responses.retrieve(endless.id).status == "in_progress", 30.0, "it has not begun")
    assert client.responses.cancel(endless.id).status == "cancelled"
    daemon.wait_idle()
    assert client.responses.retrieve(endless.id).status == "cancelled"


def test_leaving_frees_the_place(daemon: Daemon, client: OpenAI) -> None:
    stream = client.responses.create(model=MODEL, input="Say hello.", stream=True, **ENDLESS)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    daemon.wait_idle()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).responses.create(model=MODEL, input="Say hello.", **ENDLESS)
    daemon.wait_idle()
