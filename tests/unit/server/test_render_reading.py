"""Answers whose text is read: the full message is the fold of the stream's deltas, thoughts and calls too."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from engine.client import Chunk, Usage
from engine.params import SamplingParams
from engine.request import FinishReason
from engine.text.tokenizer import Tokenizer
from server.chat.reader import Reading
from server.chat.tools import FORMATS
from server.choices import Chunks
from server.convert import Generation, Work
from server.protocol.chat import ChatCompletion, ChatCompletionChunk
from server.render import Answer, ChatShape, UsageReports
from tests.factories_answers import of_full, of_stream
from tests.factories_engine import FakeTokenizer

READING = Reading(thinks=True, tool_format=FORMATS["hermes"], tool_names=frozenset({"f"}))
CALL = '<tool_call>{"name": "f", "arguments": {"a": "é\u2028"}}</tool_call>'
PIECES = ["<think>", "</think>", CALL, "<tool_call>", "</tool_call>", CALL[:45], "\n", "Hm. ", "Yes."]


def make_answer() -> Answer:
    work = Work((Generation((1,), SamplingParams()),), 1, priority=0, cache_salt="", num_each=1, reading=READING)
    return Answer(ChatShape(), work, cast(Tokenizer, FakeTokenizer()), model="fake", fingerprint="fp_1")


async def chunks_of(texts: list[str], finish: FinishReason) -> Chunks:
    for i, text in enumerate(texts, start=1):
        yield 0, Chunk(text, (7,), Usage(1, 0, i), finish if i == len(texts) else None)


async def answers(texts: list[str], finish: FinishReason) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    full = await make_answer().full(chunks_of(texts, finish))
    events = [event async for event in make_answer().stream(chunks_of(texts, finish), UsageReports())]
    assert all(len(event.splitlines()) == 1 for event in events)
    return full, [json.loads(event) for event in events]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    places=st.lists(st.integers(0, 300), max_size=6),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_the_full_message_is_the_fold_of_the_stream(text: str, places: list[int], finish: FinishReason) -> None:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    texts = [text[start:end] for start, end in pairwise(borders)]
    full, events = asyncio.run(answers(texts, finish))
    ChatCompletion.model_validate(full)
    for event in events:
        ChatCompletionChunk.model_validate(event)
    choice, message = full["choices"][0], full["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message.get("reasoning_content", "")
    ((folded,), _), ((whole,), _) = of_stream(events), of_full(full)
    assert folded.calls == whole.calls
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + [choice["finish_reason"]]
    is_whole = bool(whole.calls) and all(is_json(call["arguments"]) for call in whole.calls)
    assert (choice["finish_reason"] == "tool_calls") == (is_whole and finish is FinishReason.STOP)
