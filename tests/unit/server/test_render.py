"""Chunks -> answers. The full answer is the fold of the stream, and both are what the protocol's models say."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from engine.client import Chunk, Usage
from engine.params import SamplingParams
from engine.request import FinishReason
from engine.text.tokenizer import Tokenizer
from server.choices import Chunks
from server.convert import Generation, Work
from server.json_text import dump_line
from server.protocol.chat import ChatCompletion, ChatCompletionChunk
from server.protocol.completions import Completion, CompletionChunk
from server.render import Answer, ChatShape, CompletionShape, Shape, UsageReports
from tests.factories_engine import FakeTokenizer

pytestmark = pytest.mark.anyio

Said = Sequence[tuple[int, str]]
"""What choices say, in order of arrival; "" has its text held back."""


async def chunks_of(said: Said, *, num_cached: int = 0, **end: Any) -> Chunks:
    """A token for each text. The last of each choice ends it."""
    last = {index: i for i, (index, _) in enumerate(said)}
    counts = dict.fromkeys(last, 0)
    for i, (index, text) in enumerate(said):
        counts[index] += 1
        usage = Usage(3, num_cached if index == 0 else 3, counts[index])
        finish = {"finish_reason": FinishReason.STOP} | end if last[index] == i else {}
        yield index, Chunk(text, (7,), usage, **finish)


def make_answer(shape: Shape, num_choices: int = 1, n: int = 1) -> Answer:
    work = Work((Generation((1, 2, 3), SamplingParams()),) * num_choices, n, priority=0, cache_salt="", num_each=n)
    return Answer(shape, work, cast(Tokenizer, FakeTokenizer()), model="fake", fingerprint="fp_1")


async def full(shape: Shape, said: Said, num_choices: int = 1, n: int = 1, **end: Any) -> dict[str, Any]:
    return await make_answer(shape, num_choices, n).full(chunks_of(said, **end))


async def stream(
    shape: Shape, said: Said, num_choices: int = 1, n: int = 1, *, reports: UsageReports | None = None, **end: Any
) -> list[dict[str, Any]]:
    answer = make_answer(shape, num_choices, n).stream(chunks_of(said, **end), reports or UsageReports())
    return [json.loads(event) async for event in answer]


def check_exactly(model: type[BaseModel], value: dict[str, Any]) -> None:
    """`value` is what the model says, with no field that it does not know, at any depth."""
    parsed = model.model_validate(value)
    assert parsed.model_dump(exclude_unset=True) == value


ROUTES = [(CompletionShape(), Completion, CompletionChunk), (ChatShape(), ChatCompletion, ChatCompletionChunk)]
both = pytest.mark.parametrize(("shape", "full_model", "chunk_model"), ROUTES, ids=["completions", "chat"])


@both
async def test_answers_are_what_the_protocol_says(
    shape: Shape, full_model: type[BaseModel], chunk_model: type[BaseModel]
) -> None:
    said = [(0, "a"), (1, "b"), (0, "c")]
    answer = await full(shape, said, 2, 2)
    check_exactly(full_model, answer)
    assert set(answer) == set(full_model.model_fields) - {"prompt_logprobs"}
    for chunk in await stream(shape, said, 2, 2, reports=UsageReports(at_end=True, in_every_chunk=True)):
        check_exactly(chunk_model, chunk)


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, full or of a stream, of either route."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content", ""))


@both
@given(said=st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5)), max_size=12), random=st.randoms())
def test_the_stream_joined_is_the_full_answer(
    shape: Shape,
    full_model: type[BaseModel],
    chunk_model: type[BaseModel],
    said: list[tuple[int, str]],
    random: random.Random,
) -> None:
    said = [*said, (0, ""), (1, "x"), (2, "")]  # each choice ends somewhere, also with nothing to say
    random.shuffle(said)
    asyncio.run(check_stream_against_full(shape, said))


async def check_stream_against_full(shape: Shape, said: Said) -> None:
    answer = await full(shape, said, 3, 3, num_cached=2)
    events = await stream(shape, said, 3, 3, num_cached=2, reports=UsageReports(at_end=True))
    *chunks, usage = events
    assert usage["choices"] == []
    assert usage["usage"] == answer["usage"]
    for index, choice in enumerate(answer["choices"]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert choice["index"] == index
        assert text_of(choice) == "".join(text_of(each) for each in own)
        assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        if "delta" in own[0]:
            assert ["role" in each["delta"] for each in own] == [True] + [False] * (len(own) - 1)


@both
async def test_the_same_id_and_time_over_a_stream_and_a_new_id_each_time(
    shape: Shape, full_model: type[BaseModel], chunk_model: type[BaseModel]
) -> None:
    first, second = [await stream(shape, [(0, "a"), (0, "b")], reports=UsageReports(at_end=True)) for _ in range(2)]
    common = {tuple(event[name] for name in ("id", "created", "model", "system_fingerprint")) for event in first}
    assert len(common) == 1
    assert first[0]["id"].startswith(shape.id_prefix)
    assert first[0]["id"] != second[0]["id"]


async def test_a_held_back_text_is_no_event() -> None:
    assert len(await stream(CompletionShape(), [(0, ""), (0, "a"), (0, ""), (0, "")])) == 2


async def test_an_answer_that_says_nothing_still_has_its_role_and_end() -> None:
    (chunk,) = await stream(ChatShape(), [(0, "")])
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert (await full(ChatShape(), [(0, "")]))["choices"][0]["message"]["content"] == ""


async def test_a_last_chunk_without_text_has_an_empty_delta() -> None:
    assert (await stream(ChatShape(), [(0, "a"), (0, "")]))[-1]["choices"][0]["delta"] == {}


@both
@pytest.mark.parametrize(
    ("end", "finish_reason", "stop_reason"),
    [
        ({"finish_reason": FinishReason.LENGTH}, "length", None),
        ({"stop_reason": "\n\n"}, "stop", "\n\n"),
        ({"stop_reason": 5}, "stop", 5),
    ],
)
async def test_how_it_ended(
    shape: Shape,
    full_model: type[BaseModel],
    chunk_model: type[BaseModel],
    end: dict[str, Any],
    finish_reason: str,
    stop_reason: str | int | None,
) -> None:
    for choice in ((await full(shape, [(0, "a")], **end)), (await stream(shape, [(0, "a")], **end))[-1]):
        assert choice["choices"][0]["finish_reason"] == finish_reason
        assert choice["choices"][0]["stop_reason"] == stop_reason


async def test_usage_counts_each_prompt_once_and_all_output() -> None:
    said = [(0, "a"), (1, "b"), (1, "c"), (2, "d"), (3, "e")]  # two prompts of three tokens, two choices each
    usage = (await full(CompletionShape(), said, 4, 2, num_cached=1))["usage"]
    assert usage == {
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 1 + 3},  # of the prompts' first choices, 0 and 2
    }


@pytest.mark.parametrize(
    ("reports", "usages"),
    [
        (UsageReports(), ["absent", "absent"]),
        (UsageReports(at_end=True), [None, None, 2]),
        (UsageReports(at_end=True, in_every_chunk=True), [1, 2, 2]),
    ],
)
async def test_usage_in_a_stream(reports: UsageReports, usages: list[Any]) -> None:
    events = await stream(CompletionShape(), [(0, "a"), (0, "b")], reports=reports)
    seen = [event.get("usage", "absent") for event in events]
    assert [usage["completion_tokens"] if isinstance(usage, dict) else usage for usage in seen] == usages


@given(st.text())
def test_quoted_text_is_json_on_one_line(text: str) -> None:
    quoted = dump_line(text)
    assert json.loads(quoted) == text
    assert len(quoted.splitlines()) == 1


def test_text_is_shown_as_it_is() -> None:
    assert dump_line('é 缆车 😀 "\n') == '"é 缆车 😀 \\"\\n"'
    assert dump_line("a\u2028b\x85") == '"a\\u2028b\\u0085"'
