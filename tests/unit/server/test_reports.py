"""What answers say beside their text: logprobs and token ids, of both routes, in full and as streams.

Tokens are random, so that characters are split, special tokens lie about, and stop strings hold text back; the chunks
are made by the engine's own RequestOutput from random pieces.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from engine.client import Chunk
from engine.messages import Event, Finished, RequestTimings, TokensOut
from engine.output import RequestOutput
from engine.plan import TokenLogprobs
from engine.request import FinishReason
from engine.text.tokenizer import Tokenizer
from server.choices import Chunks
from server.convert import Echo, Generation, Reports, Work
from server.protocol.chat import ChatCompletion, ChatCompletionChunk
from server.protocol.completions import Completion, CompletionChunk
from server.render import Answer, ChatShape, CompletionShape, Shape, UsageReports
from tests import factories_text as texts
from tests.factories import make_submit

TIMINGS = RequestTimings(0, 0, 0, 0, 0)


@dataclass
class Case:
    """One choice: what the engine made, and how it was asked for."""

    tokenizer: Tokenizer
    prompt: list[int]
    output: list[int]
    reports: Reports
    finish: FinishReason = FinishReason.LENGTH
    ends_by_token: bool = False
    echo: Echo | None = None
    params: dict[str, Any] = field(default_factory=dict)

    def logprobs_of(self, token_id: int, place: int) -> TokenLogprobs:
        numbers = random.Random(token_id * 1000 + place)
        top = tuple((numbers.randrange(self.tokenizer.vocab_size), -float(i)) for i in range(3))
        return TokenLogprobs(token_id, -numbers.random() * 9, numbers.randrange(1, 9), top)

    def chunks(self, sizes: random.Random) -> list[Chunk]:
        """The engine's chunks, in pieces of random sizes."""
        submit = make_submit(0, self.prompt, **self.params)
        output = RequestOutput(self.tokenizer, submit)
        scores = [self.logprobs_of(token_id, i) for i, token_id in enumerate(self.prompt)][1:]
        cut = sizes.randint(0, len(scores))
        events: list[Event] = [
            TokensOut(0, (), 0, prompt_logprobs=tuple(part)) for part in (scores[:cut], scores[cut:]) if part
        ]
        for i, token_id in enumerate(self.output):
            events.append(TokensOut(0, (token_id,), 0, (self.logprobs_of(token_id, i + 500),)))
        stop_token_id = self.output[-1] if self.ends_by_token and self.output else None
        reason = FinishReason.STOP if stop_token_id is not None else FinishReason.LENGTH
        events.append(Finished(0, reason, stop_token_id, len(self.prompt), 0, len(self.output), 99, TIMINGS))
        chunks = []
        while events and (not chunks or chunks[-1].finish_reason is None):
            size = sizes.randint(1, 3)
            size += size == len(events) - 1  # the end comes with the last token
            chunks.append(output.take(events[:size]))
            events = events[size:]
        return chunks

    def answer(self, shape: Shape) -> Answer:
        params = make_submit(0, self.prompt, **self.params).params
        generation = Generation(tuple(self.prompt), params, self.echo)
        work = Work((generation,), 1, priority=0, cache_salt="", num_each=1, reports=self.reports)
        return Answer(shape, work, self.tokenizer, model="fake", fingerprint="fp")


async def _as_stream(chunks: Sequence[Chunk]) -> Chunks:
    for chunk in chunks:
        yield 0, chunk


def full(case: Case, shape: Shape, seed: int) -> dict[str, Any]:
    chunks = _as_stream(case.chunks(random.Random(seed)))
    return asyncio.run(case.answer(shape).full(chunks))


def stream(case: Case, shape: Shape, seed: int) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        chunks = _as_stream(case.chunks(random.Random(seed)))
        return [json.loads(event) async for event in case.answer(shape).stream(chunks, UsageReports())]

    return asyncio.run(collect())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokenizer = draw(st.sampled_from([texts.byte_level, texts.sentencepiece, texts.word_piece, texts.metaspace]))()
    ids = st.integers(0, tokenizer.vocab_size - 1)
    prompt, output = draw(st.lists(ids, min_size=1, max_size=8)), draw(st.lists(ids, max_size=12))
    count = st.none() | st.integers(0, 3)
    skip = draw(st.booleans())
    params = {
        "skip_special_tokens": skip,
        "stop": draw(st.sampled_from([(), (), ("li", "é", "e c")])),
        "include_stop_str_in_output": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([(), (5,)])),
    }
    return Case(
        tokenizer,
        prompt,
        output,
        Reports(draw(count), None, draw(st.booleans())),
        ends_by_token=draw(st.booleans()),
        params=params,
    )


def with_echo(case: Case) -> Case:
    skip = bool(case.params["skip_special_tokens"])
    case.echo = Echo(case.tokenizer.decode(case.prompt, skip_special_tokens=skip), is_clients=False)
    return case


def is_whole(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the tokens stand for bytes, and the prompt does not end inside a character."""
    if tokenizer.pieces is None or tokenizer.pieces.errors != "replace":
        return False
    try:
        b"".join(map(tokenizer.token_bytes, prompt)).decode()
    except UnicodeDecodeError:
        return False
    return True


def check_exactly(model: type[BaseModel], value: dict[str, Any]) -> None:
    assert model.model_validate(value).model_dump(exclude_unset=True) == value


@settings(deadline=None, max_examples=150)
@given(cases(), st.booleans(), st.integers(0, 2**31), st.integers(0, 2**31))
def test_completions_stream_is_the_full_answer(case: Case, echo: bool, seed: int, other: int) -> None:
    case = with_echo(case) if echo else case
    answer = full(case, CompletionShape(), seed)
    check_exactly(Completion, answer)
    chunks = stream(case, CompletionShape(), other)
    for chunk in chunks:
        check_exactly(CompletionChunk, chunk)
    (choice,), pieces = answer["choices"], [chunk["choices"][0] for chunk in chunks]
    if case.reports.logprobs is None:
        assert choice["logprobs"] is None
        assert all(piece["logprobs"] is None for piece in pieces)
        return
    shape = choice["logprobs"]
    num_tokens = answer["usage"]["completion_tokens"] + (len(case.prompt) if echo else 0)
    assert {len(values) for values in shape.values()} == {num_tokens}
    # How far a stop string is overrun depends on how the tokens came; that is no business of this test.
    for name, values in shape.items():
        joined = [value for piece in pieces for value in piece["logprobs"][name]]
        common = min(len(joined), len(values))
        assert joined[:common] == values[:common]
        assert len(joined) == len(values) or choice["finish_reason"] == "stop"
    assert shape["text_offset"] == sorted(shape["text_offset"])
    assert [logprob is None for logprob in shape["token_logprobs"]] == [echo and i == 0 for i in range(num_tokens)]


@settings(deadline=None, max_examples=150)
@given(cases(), st.integers(0, 2**31), st.integers(0, 2**31))
def test_chat_stream_is_the_full_answer(case: Case, seed: int, other: int) -> None:
    answer = full(case, ChatShape(), seed)
    check_exactly(ChatCompletion, answer)
    chunks = stream(case, ChatShape(), other)
    for chunk in chunks:
        check_exactly(ChatCompletionChunk, chunk)
    (choice,), pieces = answer["choices"], [chunk["choices"][0] for chunk in chunks]
    if case.reports.token_ids:
        token_ids = [token_id for piece in pieces for token_id in piece["token_ids"]]
        common = min(len(token_ids), len(choice["token_ids"]))
        assert token_ids[:common] == choice["token_ids"][:common] == case.output[:common]
        assert choice["prompt_token_ids"] == pieces[0]["prompt_token_ids"] == case.prompt
        assert all("prompt_token_ids" not in piece for piece in pieces[1:])
    else:
        assert not any("token_ids" in piece for piece in (choice, *pieces))
    if case.reports.logprobs is None:
        return
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    joined = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
    common = min(len(joined), len(content))
    assert joined[:common] == content[:common]
    assert all(len(entry["top_logprobs"]) == case.reports.logprobs for entry in content)
    if is_whole(case.tokenizer, case.prompt):
        says = b"".join(bytes(entry["bytes"] or ()) for entry in content).decode(errors="replace")
        text = choice["message"]["content"]
        assert says == text or (choice["stop_reason"] is not None and says.startswith(text))


def make_case(text: str, output: str, *, reports: Reports, echo: bool = False, **params: Any) -> Case:
    tokenizer = texts.byte_level()
    prompt = tokenizer.encode(text)
    case = Case(tokenizer, prompt, tokenizer.encode(output, add_special_tokens=False), reports, params=params)
    case.echo = Echo(text, is_clients=True) if echo else None
    return case


@pytest.mark.parametrize(("output", "ends_by_token"), [("crème 缆车 chairlift", False), ("stops:<|im_end|>", True)])
def test_offsets_point_at_each_token_in_the_text(output: str, ends_by_token: bool) -> None:
    case = make_case("<|im_start|>user naïvely 缆", output, reports=Reports(logprobs=1), echo=True)
    case.ends_by_token = ends_by_token
    (choice,) = full(case, CompletionShape(), 1)["choices"]
    assert choice["text"] == "<|im_start|>user naïvely 缆" + output.removesuffix("<|im_end|>")
    shape = choice["logprobs"]
    ends = [*shape["text_offset"][1:], len(choice["text"])]
    places = [each for each in zip(shape["tokens"], shape["text_offset"], ends, strict=True) if each[0] != "<|im_end|>"]
    whole = [(token, start, end) for token, start, end in places if not token.startswith("bytes:")]
    assert [choice["text"][start:end] for _, start, end in whole] == [token for token, *_ in whole]
    assert len(whole) > 8


def test_a_begin_of_text_token_that_the_client_did_not_write_has_no_width() -> None:
    tokenizer = texts.sentencepiece()
    prompt = tokenizer.encode("a lift")
    case = Case(tokenizer, prompt, tokenizer.encode(" a", add_special_tokens=False), Reports(logprobs=0))
    case.echo = Echo("a lift", is_clients=True)
    (choice,) = full(case, CompletionShape(), 0)["choices"]
    assert prompt[0] == tokenizer.bos_token_id
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]
    assert choice["logprobs"]["text_offset"][len(prompt)] == len("a lift")


def test_parts_of_characters_are_written_as_bytes() -> None:
    case = make_case("x", "語", reports=Reports(logprobs=0))
    pieces = [case.tokenizer.token_bytes(token_id) for token_id in case.output]
    assert len(pieces) == 3
    (choice,) = full(case, CompletionShape(), 0)["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xe8", "bytes:\\xaa", "bytes:\\x9e"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0]
    (choice,) = full(case, ChatShape(), 0)["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["\\xe8", "\\xaa", "\\x9e"]
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xE8], [0xAA], [0x9E]]


def test_the_token_that_ended_it_has_an_entry_but_no_bytes() -> None:
    case = make_case("x", "a<|im_end|>", reports=Reports(logprobs=2, token_ids=True))
    case.ends_by_token = True
    (choice,) = full(case, ChatShape(), 0)["choices"]
    assert choice["message"]["content"] == "a"
    assert [(e["token"], e["bytes"]) for e in choice["logprobs"]["content"]] == [("a", [97]), ("<|im_end|>", None)]
    assert choice["token_ids"] == case.output


def test_top_logprobs_of_completions_have_the_chosen_token_too() -> None:
    case = make_case("x", "ab", reports=Reports(logprobs=0))
    (choice,) = full(case, CompletionShape(), 0)["choices"]
    shape = choice["logprobs"]
    assert shape["top_logprobs"] == [{t: p} for t, p in zip(shape["tokens"], shape["token_logprobs"], strict=True)]


def test_prompt_logprobs_as_vllm_has_them() -> None:
    case = make_case("ab", "c", reports=Reports(prompt_logprobs=1))
    first = full(case, CompletionShape(), 0)["choices"][0]["prompt_logprobs"]
    chat = full(case, ChatShape(), 0)
    assert chat["prompt_logprobs"] == first
    assert "prompt_logprobs" not in chat["choices"][0]
    assert len(first) == len(case.prompt)
    assert first[0] is None
    entry = case.logprobs_of(case.prompt[1], 1)
    (likeliest, logprob), *_ = entry.top
    assert first[1] == {
        str(entry.token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": "b"},
        str(likeliest): {
            "logprob": logprob,
            "rank": 1,
            "decoded_token": case.tokenizer.token_bytes(likeliest).decode(errors="replace"),
        },
    }
