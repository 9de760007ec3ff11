"""Engine chunks -> API answers. One path: a full answer is the fold of the very deltas that a stream sends.

    (index, Chunk) --_take--> Delta --+--> Answer.stream: a JSON text for each
                                      +--> Answer.full: folded by choice, one JSON object

A stream has a delta for each token of each client, so its JSON is put together from parts that are made once for each
answer; only the text itself is quoted. What is asked for beside the text (`reports`) goes along with its delta. What
the two routes differ in is a Shape. Knows no HTTP, no framing, no engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.client import Chunk, Usage
from engine.request import FinishReason
from engine.text.tokenizer import Tokenizer
from server.chat.reader import Reader
from server.chat.said import Call, Said
from server.choices import Chunks
from server.convert import Reports, Work
from server.errors import Row, row_of
from server.json_text import dump, dump_line
from server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from server.reports import Report, ReportedToken, Reporter
from server.requestlog import Generated, Times


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice has to say next."""

    index: int
    text: str
    is_first: bool
    finish_reason: str | None
    """On the choice's last delta only."""
    stop_reason: str | int | None
    reasoning: str = ""
    """The thoughts before the text."""
    calls: tuple[dict[str, Any], ...] = ()
    """Calls of tools, as the stream has them."""
    report: Report | None = None
    """What is asked for beside the text."""


class Shape(Protocol):
    """What the two routes differ in."""

    id_prefix: str
    object: str
    chunk_object: str
    has_prompt_logprobs_in_choices: bool
    """Else the answer has them beside its choices, which are all of one prompt."""

    def delta_json(self, delta: Delta) -> str:
        """The member of a stream's choice that holds the text."""

    def content(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The member of a full answer's choice that holds it: what the deltas fold to."""

    def logprobs(self, tokenizer: Tokenizer, tokens: Sequence[ReportedToken], num_top: int) -> dict[str, Any]:
        """The logprobs of these tokens."""


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    has_prompt_logprobs_in_choices = True

    def delta_json(self, delta: Delta) -> str:
        """See Shape."""
        return f'"text":{dump_line(delta.text)}'

    def content(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """See Shape."""
        return {"text": _text(deltas)}

    def logprobs(self, tokenizer: Tokenizer, tokens: Sequence[ReportedToken], num_top: int) -> dict[str, Any]:
        """See Shape."""
        return completion_logprobs(tokenizer, tokens, num_top)


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_prompt_logprobs_in_choices = False

    def delta_json(self, delta: Delta) -> str:
        """See Shape."""
        members = ['"role":"assistant"'] if delta.is_first else []
        if delta.text or (delta.is_first and not delta.reasoning and not delta.calls):
            members.append(f'"content":{dump_line(delta.text)}')
        if delta.reasoning:
            members.append(f'"reasoning_content":{dump_line(delta.reasoning)}')
        if delta.calls:
            members.append(f'"tool_calls":{dump_line(delta.calls)}')
        return f'"delta":{{{",".join(members)}}}'

    def content(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """See Shape."""
        text = _text(deltas)
        reasoning = "".join([delta.reasoning for delta in deltas])
        calls = _whole_calls(deltas)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def logprobs(self, tokenizer: Tokenizer, tokens: Sequence[ReportedToken], num_top: int) -> dict[str, Any]:
        """See Shape."""
        return chat_logprobs(tokenizer, tokens, num_top)


def _whole_calls(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    """The calls that the parts in a stream make, without its numbers."""
    parts = [call for delta in deltas for call in delta.calls]
    arguments: dict[int, list[str]] = {}
    for part in parts:
        arguments.setdefault(part["index"], []).append(part["function"]["arguments"])
    return [
        {"id": part["id"], "type": part["type"], "function": {**part["function"], "arguments": "".join(texts)}}
        for part, texts in zip((part for part in parts if "id" in part), arguments.values(), strict=True)
    ]


def _text(deltas: Sequence[Delta]) -> str:
    return "".join([delta.text for delta in deltas])


@dataclass(frozen=True, slots=True)
class UsageReports:
    """Which token counts a stream carries."""

    at_end: bool = False
    in_every_chunk: bool = False


@dataclass(slots=True)
class _Choice:
    """A choice so far."""

    reader: Reader | None
    """None if the text is shown as it is."""
    echo: str
    """The prompt, if it is shown: comes with the first delta."""
    reporter: Reporter | None
    """None if nothing is asked for beside the text."""
    num_calls: int = 0
    has_begun: bool = False
    usage: Usage | None = None
    finish_reason: str | None = None
    deltas: list[Delta] = field(default_factory=list)
    """Kept for a full answer only."""


class Answer:
    """One answer, as a stream or in full: used once."""

    def __init__(self, shape: Shape, work: Work, tokenizer: Tokenizer, *, model: str, fingerprint: str) -> None:
        self._shape = shape
        self._work = work
        self._tokenizer = tokenizer
        self._num_prompt_tokens = sum(len(each.prompt_token_ids) for each in work.generations[:: work.num_each])
        needs_reporter = work.reports != Reports() or work.num_each > work.n
        self._choices = [
            _Choice(
                None if work.reading is None else work.reading.reader(),
                "" if generation.echo is None else generation.echo.text,
                Reporter(tokenizer, generation, work.reports) if needs_reporter else None,
            )
            for generation in work.generations
        ]
        self._times = Times()
        self._is_stream = False
        self._failure: Row | None = None
        self._id = shape.id_prefix + secrets.token_hex(16)
        self._common = {
            "id": self._id,
            "object": shape.object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def generated(self) -> Generated:
        """What it has come to so far."""
        usage = self._usage()
        reasons = [choice.finish_reason for choice in self._choices]
        return Generated(
            response_id=self._id,
            params=self._work.generations[0].params,
            num_choices=self._work.n,
            is_stream=self._is_stream,
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            num_output_tokens=usage["completion_tokens"],
            times=self._times,
            finish_reasons=tuple(reason for reason in reasons if reason is not None),
            failure=self._failure,
        )

    async def full(self, chunks: Chunks) -> dict[str, Any]:
        """The whole answer, once all of it is there. Closes `chunks`."""
        with self._noting_failure():
            async with aclosing(chunks):
                async for index, chunk in chunks:
                    if (delta := self._take(index, chunk)) is not None:
                        self._choices[index].deltas.append(delta)
        choices = [self._fold(index, choice.deltas) for index, choice in enumerate(self._shown())]
        answer = {**self._common, "choices": choices, "usage": self._usage()}
        if self._work.reports.prompt_logprobs is not None and not self._shape.has_prompt_logprobs_in_choices:
            of_each = [choice.pop("prompt_logprobs") for choice in choices]
            answer["prompt_logprobs"] = of_each[0]
        return answer

    async def stream(self, chunks: Chunks, reports: UsageReports) -> AsyncGenerator[str, None]:
        """A JSON text for each delta, then one for the usage if it is asked for. Closes `chunks`."""
        common = dump({**self._common, "object": self._shape.chunk_object})[:-1]  # without the closing brace
        ending = ',"usage":null}' if reports.at_end else "}"  # the null is OpenAI's
        self._is_stream = True
        with self._noting_failure():
            async with aclosing(chunks):
                async for index, chunk in chunks:
                    if (delta := self._take(index, chunk)) is None:
                        continue
                    if reports.in_every_chunk:
                        ending = f',"usage":{dump(self._usage())}}}'
                    yield f'{common},"choices":[{self._choice_json(delta)}]{ending}'
        if reports.at_end:
            yield f'{common},"choices":[],"usage":{dump(self._usage())}}}'

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = row_of(error)
            raise

    def _take(self, index: int, chunk: Chunk) -> Delta | None:
        """The delta that a chunk makes; None while the text of its tokens is held back."""
        choice = self._choices[index]
        choice.usage = chunk.usage
        if self._times.first_token_s is None or chunk.finish_reason is not None:
            self._times.note(chunk)
        said = Said(chunk.text)
        if choice.reader is not None:
            said = choice.reader.feed(chunk.text)
            if chunk.finish_reason is not None:
                said += choice.reader.flush()
        if choice.reporter is not None:
            choice.reporter.take(chunk)
        if not said and chunk.finish_reason is None:
            return None
        is_first, choice.has_begun = not choice.has_begun, True
        calls = tuple([self._call(choice, call) for call in said.calls])
        finish_reason = None if chunk.finish_reason is None else chunk.finish_reason.value
        is_cut_off = choice.reader is not None and choice.reader.is_in_call
        if chunk.finish_reason is FinishReason.STOP and choice.num_calls and not is_cut_off:
            finish_reason = "tool_calls"
        choice.finish_reason = finish_reason
        return Delta(
            index=index,
            text=choice.echo + said.content if is_first else said.content,
            is_first=is_first,
            finish_reason=finish_reason,
            stop_reason=chunk.stop_reason,
            reasoning=said.reasoning,
            calls=calls,
            report=None if choice.reporter is None else choice.reporter.flush(),
        )

    def _call(self, choice: _Choice, call: Call) -> dict[str, Any]:
        """The next call of a choice, or more of its last one, as a stream has it."""
        assert self._work.reading is not None
        if call.name is None:
            return {"index": choice.num_calls - 1, "function": {"arguments": call.arguments}}
        index, choice.num_calls = choice.num_calls, choice.num_calls + 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": self._work.reading.new_call_id(), "type": "function", "function": function}

    def _shown(self) -> Iterator[_Choice]:
        """The choices of a full answer: of each prompt's, the likeliest, or all in their order."""
        n, num_each = self._work.n, self._work.num_each
        for start in range(0, len(self._choices), num_each):
            choices = self._choices[start : start + num_each]
            yield from choices if n == num_each else sorted(choices, key=_mean_logprob, reverse=True)[:n]

    def _choice_json(self, delta: Delta) -> str:
        """A stream's choice."""
        start = f'{{"index":{delta.index},{self._shape.delta_json(delta)},'
        if delta.report is None:
            start += '"logprobs":null,"finish_reason":'
        else:
            start += f'{dump_line(self._report(delta.report))[1:-1]},"finish_reason":'
        if delta.finish_reason is None:
            return start + "null}"
        return f'{start}{dump(delta.finish_reason)},"stop_reason":{dump(delta.stop_reason)}}}'

    def _fold(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        """A full answer's choice."""
        last = deltas[-1]
        report = sum((delta.report for delta in deltas if delta.report is not None), Report())
        choice = {
            "index": index,
            **self._shape.content(deltas),
            **self._report(report),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        if (num_top := self._work.reports.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, report.prompt_logprobs, num_top)
        return choice

    def _report(self, report: Report) -> dict[str, Any]:
        """The members of a choice that say what is asked for beside the text."""
        wanted = self._work.reports
        members: dict[str, Any] = {"logprobs": None}
        if wanted.logprobs is not None:
            members["logprobs"] = self._shape.logprobs(self._tokenizer, report.tokens, wanted.logprobs)
        if wanted.token_ids:
            members["token_ids"] = list(report.token_ids)
            if report.prompt_token_ids:
                members["prompt_token_ids"] = list(report.prompt_token_ids)
        return members

    def _usage(self) -> dict[str, Any]:
        """Token counts so far: each prompt once, by its first choice; the output of all choices."""
        num_output = sum(choice.usage.num_output_tokens for choice in self._choices if choice.usage)
        num_cached = sum(
            choice.usage.num_cached_tokens for choice in self._choices[:: self._work.num_each] if choice.usage
        )
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output,
            "total_tokens": self._num_prompt_tokens + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }


def _mean_logprob(choice: _Choice) -> float:
    assert choice.reporter is not None
    return choice.reporter.mean_logprob
