"""Real clients, used as their documentation has it, against the real process with the real model.

They are not among the project's dependencies: some want older versions of what it is tested with. To run these tests,
give them an environment of their own, without constraints.txt:

    python -m venv .venv-clients
    .venv-clients/bin/pip install -e '.[dev]' litellm langchain-openai instructor 'pydantic-ai-slim[openai]'
    .venv-clients/bin/python -m pytest -W default::pytest.PytestUnraisableExceptionWarning tests/e2e/test_clients.py

(They leave connections open for the interpreter to close, hence the `-W`.)
"""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.e2e.process import Daemon

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # their own warnings are theirs to mend

QUESTION = "What is the weather in Paris?"


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "Weather", "description": "The weather of a city.", "parameters": Weather.model_json_schema()},
}


def test_litellm(daemon: Daemon) -> None:
    litellm = pytest.importorskip("litellm")
    common = {
        "model": "openai/smollm2",
        "api_base": f"{daemon.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
    }
    full = litellm.completion(**common, max_tokens=12)
    chunks = list(litellm.completion(**common, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == full.choices[0].message.content
    assert rebuilt.choices[0].finish_reason == full.choices[0].finish_reason == "length"
    assert rebuilt.usage.completion_tokens == full.usage.completion_tokens == 12
    assert rebuilt.usage.prompt_tokens == full.usage.prompt_tokens
    forced = {"tools": [WEATHER_TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    called = litellm.stream_chunk_builder(list(litellm.completion(**common, **forced, stream=True)))
    (call,) = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls"
    assert Weather.model_validate_json(call.function.arguments)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**common | {"temperature": -1})


def test_langchain(daemon: Daemon) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    llm = langchain_openai.ChatOpenAI(
        model="smollm2", base_url=f"{daemon.url}/v1", api_key="none", temperature=0, max_tokens=100, max_retries=0
    )
    said = llm.invoke(QUESTION)
    parts = list(llm.stream(QUESTION, stream_usage=True))
    whole = sum(parts[1:], parts[0])
    assert len(parts) > 5
    assert whole.content == said.content
    assert whole.usage_metadata["total_tokens"] == said.usage_metadata["total_tokens"]
    for method in ("json_schema", "function_calling"):
        answer = llm.with_structured_output(Weather, method=method).invoke(QUESTION)
        assert isinstance(answer, Weather)
    forced = llm.bind_tools([Weather], tool_choice="Weather")
    pieces = list(forced.stream(QUESTION))
    total = sum(pieces[1:], pieces[0])
    (call,) = total.tool_calls
    assert sum(bool(piece.tool_call_chunks) for piece in pieces) > 3  # its arguments come in pieces
    assert Weather.model_validate(call["args"])
    assert not total.invalid_tool_calls


def test_instructor(daemon: Daemon) -> None:
    instructor = pytest.importorskip("instructor")
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as sdk:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(sdk, mode=mode)
            asked: dict[str, Any] = {
                "model": "smollm2",
                "messages": [{"role": "user", "content": QUESTION}],
                "response_model": Weather,
                "max_tokens": 100,
                "temperature": 0,
                "max_retries": 1,
            }
            answer = client.chat.completions.create(**asked)
            assert isinstance(answer, Weather)
            *_, last = client.chat.completions.create_partial(**asked)
            assert last.model_dump() == answer.model_dump()


def test_pydantic_ai(daemon: Daemon) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{daemon.url}/v1", api_key="none")
    model = OpenAIChatModel("smollm2", provider=provider)
    settings = {"temperature": 0.0, "max_tokens": 100, "parallel_tool_calls": False}
    for output_type in (Weather, pydantic_ai.NativeOutput(Weather)):  # by a forced call; by response_format
        agent = pydantic_ai.Agent(model, output_type=output_type, model_settings=settings, retries=1)
        result = agent.run_sync(QUESTION)
        assert isinstance(result.output, Weather)
        assert result.usage.output_tokens > 5


def test_the_openai_sdks_own_accumulators(daemon: Daemon) -> None:
    """A stream's calls come as events, piece by piece, and add up to what the answer in full says."""
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as sdk:
        asked: dict[str, Any] = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": QUESTION}],
            "tools": [WEATHER_TOOL],
            "tool_choice": "required",
            "max_tokens": 200,
            "seed": 4,
        }
        full = sdk.chat.completions.create(**asked).choices[0]
        with sdk.chat.completions.stream(**asked) as stream:
            deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == full.finish_reason
    calls = [(call.function.name, call.function.arguments) for call in full.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()] == calls
    joined = ["".join(event.arguments_delta for event in deltas if event.index == index) for index in range(len(calls))]
    assert joined == [arguments for _, arguments in calls]
    assert len(deltas) > 3 * len(calls)
    if full.finish_reason == "tool_calls":
        assert all(Weather.model_validate(json.loads(arguments)) for arguments in joined)
