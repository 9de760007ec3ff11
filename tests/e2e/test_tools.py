"""Calls of tools that are forced, as OpenAI's SDK asks for them, from the real process with the real model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from tests.e2e.process import Daemon

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Place(BaseModel):
    city: str = Field(max_length=20)


class GetWeather(BaseModel):
    """The weather of a place. Its schema has a reference."""

    place: Place
    is_metric: bool


TOOLS = [openai.pydantic_function_tool(GetWeather, name="get_weather")]


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=120.0) as sdk:
        yield sdk


def test_a_required_call_is_parsed_by_the_sdk(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        temperature=0,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    arguments = call.function.parsed_arguments
    assert isinstance(arguments, GetWeather)
    assert "paris" in arguments.place.city.casefold()


def test_a_named_call_streams_into_the_sdks_accumulator(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="smollm2",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=100,
        temperature=1.5,
        seed=1,
    ) as stream:
        final = stream.get_final_completion().choices[0].message
    (call,) = final.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_a_tool_whose_schema_cannot_be_held_to_is_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}],
            tool_choice="required",
        )
    assert caught.value.param == "tools"


def test_to_choose_to_call_is_more_than_this_model_can(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice") as caught:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, tools=TOOLS)
    assert caught.value.param == "tools"
