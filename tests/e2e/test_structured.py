"""Structured output as OpenAI's SDK asks for it, from the real process with the real model."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from tests.e2e.process import Daemon

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer as JSON with the fields of the city."},
    {"role": "user", "content": "Paris is the capital of France. Its museums are the Louvre and the Orsay."},
]


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Museum(BaseModel):
    name: str = Field(max_length=20)
    is_open: bool


class City(BaseModel):
    """Nested models, an enum, a list with bounds, and a field that may be null."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
    size: Size
    museums: list[Museum] = Field(max_length=2)
    founded: int | None


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=120.0) as sdk:
        yield sdk


def test_parse_gives_a_pydantic_model(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2", messages=MESSAGES, response_format=City, max_tokens=200, temperature=0
    )
    city = answer.choices[0].message.parsed
    assert city is not None
    assert (city.name.casefold(), city.country.casefold()) == ("paris", "france")  # as small models spell them


def test_hot_and_random_choices_parse_too(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2", messages=MESSAGES, response_format=Museum, max_tokens=60, temperature=1.8, seed=3, n=4
    )
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert all(isinstance(choice.message.parsed, Museum) for choice in answer.choices)


def test_a_stream_ends_in_the_parsed_model(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="smollm2", messages=MESSAGES, response_format=City, max_tokens=200, temperature=0
    ) as stream:
        num_deltas = sum(event.type == "content.delta" for event in stream)
        final = stream.get_final_completion().choices[0].message
    assert num_deltas > 20
    assert isinstance(final.parsed, City)


def test_json_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=40, temperature=0
    )
    content = answer.choices[0].message.content
    assert content is not None
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)
    assert content.startswith("{")


def test_vllms_structured_outputs(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2",
        prompt="The sky is blue. Is the sky green? Answer:",
        max_tokens=8,
        temperature=0,
        extra_body={"structured_outputs": {"choice": [" yes", " no"]}},
    )
    assert answer.choices[0].text in (" yes", " no")
    assert answer.choices[0].finish_reason == "stop"


def test_a_grammar_that_blows_up_is_a_bad_request_while_streams_go_on(client: OpenAI) -> None:
    stream = client.completions.create(
        model="smollm2", prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    slow = {"type": "integer", "multipleOf": 99_999_989}  # would compile for minutes
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "slow", "schema": slow}},
        )
    assert caught.value.param == "response_format.json_schema.schema"
    assert "to compile" in caught.value.message
    next(iter(stream))
    stream.close()
