"""What the model says -> the events that tell of it, and the response that they make.

    begin      response.created, response.in_progress
    say        for each item: response.output_item.added ... deltas ... response.output_item.done
    end, fail  the open item's end, then response.completed, .incomplete or .failed, which carries the whole response

A full answer is the response that the last event carries, so there is one path only. An item is open while the model
goes on with it; what is of another kind closes it. Pure: knows no engine, no HTTP, no JSON.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.client import Usage
from engine.request import FinishReason
from server.chat.said import Call, Said

Event = dict[str, Any]
"""`protocol.responses_answer.ResponseEvent`."""


@dataclass(frozen=True, slots=True)
class _TextKind:
    """What messages and thoughts differ in."""

    type: str
    id_prefix: str
    part_type: str
    item: dict[str, Any]
    """Its other members."""
    part: dict[str, Any]
    """The other members of its part."""
    reported: dict[str, Any]
    """The other members of the events that carry its text."""


_MESSAGE = _TextKind(
    "message", "msg_", "output_text", {"role": "assistant"}, {"annotations": [], "logprobs": []}, {"logprobs": []}
)
_THOUGHTS = _TextKind("reasoning", "rs_", "reasoning_text", {"summary": []}, {}, {})


@dataclass(slots=True)
class _OpenText:
    """A message, or thoughts, that the model goes on with."""

    kind: _TextKind
    index: int
    id: str
    pieces: list[str] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """Where its text is, as events have it."""
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        """Its one part."""
        return {"type": self.kind.part_type, "text": text, **self.kind.part}

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """It, as the output has it."""
        return {"type": self.kind.type, "id": self.id, **self.kind.item, "status": status, "content": content}


@dataclass(slots=True)
class _OpenCall:
    """A call whose arguments are coming."""

    index: int
    item: dict[str, Any]
    """It, as the output has it, but for its arguments and status."""
    pieces: list[str] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """Which call it is, as events have it."""
        return {"item_id": self.item["id"], "output_index": self.index}


class Transcript:
    """One response as it is made. Its events are made by generators, and must be used up in order."""

    def __init__(self, response: dict[str, Any], new_call_id: Callable[[], str]) -> None:
        """`response`: as `request.new_response` makes it; from now on it is the transcript's."""
        self._response = response
        self._new_call_id = new_call_id
        self._open: _OpenText | _OpenCall | None = None
        self._num_events = 0

    @property
    def response(self) -> dict[str, Any]:
        """The response as it stands: with the items that are finished."""
        return {**self._response, "output": list(self._response["output"])}

    @property
    def has_begun(self) -> bool:
        """Events have been told."""
        return self._num_events > 0

    @property
    def thoughts(self) -> str:
        """The thoughts so far."""
        finished = [item["content"][0]["text"] for item in self._response["output"] if item["type"] == "reasoning"]
        if isinstance(self._open, _OpenText) and self._open.kind is _THOUGHTS:
            finished += self._open.pieces
        return "".join(finished)

    def begin(self) -> Iterator[Event]:
        """Work on it has begun."""
        self._response["status"] = "in_progress"
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def say(self, said: Said) -> Iterator[Event]:
        """The model has said more."""
        if said.reasoning:
            yield from self._write(_THOUGHTS, said.reasoning)
        if said.content:
            yield from self._write(_MESSAGE, said.content)
        for call in said.calls:
            yield from self._call(call)

    def end(
        self, reason: FinishReason, usage: Usage, *, num_reasoning_tokens: int, is_in_call: bool
    ) -> Iterator[Event]:
        """The model has ended, or was ended; `is_in_call`: in the midst of a call."""
        is_complete = reason is FinishReason.STOP
        if self._open is None and not self._response["output"]:
            yield from self._write(_MESSAGE, "")  # a response says something always, and be it nothing
        yield from self._close("completed" if is_complete and not is_in_call else "incomplete")
        self._response["usage"] = _usage(usage, num_reasoning_tokens)
        if is_complete:
            self._response["completed_at"] = int(time.time())
            yield self._ended("completed")
        elif reason is FinishReason.LENGTH:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            yield self._ended("incomplete")
        else:
            yield from self.fail("server_error", "the server ended the response before the model did")

    def fail(self, code: str, message: str) -> Iterator[Event]:
        """It cannot go on."""
        yield from self._close("incomplete")
        self._response["error"] = {"code": code, "message": message}
        yield self._ended("failed")

    def cancel(self) -> None:
        """Nobody wants it any more. It is in the background, where nobody hears events."""
        for _ in self._close("incomplete"):
            pass
        self._response["status"] = "cancelled"

    def _write(self, kind: _TextKind, text: str) -> Iterator[Event]:
        """Go on with the open item if it is of this kind, else begin one."""
        item = self._open
        if not isinstance(item, _OpenText) or item.kind is not kind:
            yield from self._close("completed")
            self._open = item = _OpenText(kind, len(self._response["output"]), _new_id(kind.id_prefix))
            begun = item.item("in_progress", [])
            yield self._event("response.output_item.added", output_index=item.index, item=begun)
            yield self._event("response.content_part.added", **item.place, part=item.part(""))
        if text:
            item.pieces.append(text)
            yield self._event(f"response.{kind.part_type}.delta", **item.place, delta=text, **kind.reported)

    def _call(self, call: Call) -> Iterator[Event]:
        """Begin a call, or go on with the open one."""
        if call.name is not None:
            yield from self._close("completed")
            item = {"type": "function_call", "id": _new_id("fc_"), "call_id": self._new_call_id(), "name": call.name}
            self._open = _OpenCall(len(self._response["output"]), item)
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=self._open.index, item=begun)
        assert isinstance(self._open, _OpenCall)  # `Said`: only arguments follow a call without a name
        if call.arguments:
            self._open.pieces.append(call.arguments)
            yield self._event("response.function_call_arguments.delta", **self._open.place, delta=call.arguments)

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(item.pieces)
        if isinstance(item, _OpenText):
            finished = item.item(status, [item.part(text)])
            yield self._event(f"response.{item.kind.part_type}.done", **item.place, text=text, **item.kind.reported)
            yield self._event("response.content_part.done", **item.place, part=item.part(text))
        else:
            finished = {**item.item, "arguments": text, "status": status}
            name = finished["name"]
            yield self._event("response.function_call_arguments.done", **item.place, name=name, arguments=text)
        self._response["output"].append(finished)
        yield self._event("response.output_item.done", output_index=item.index, item=finished)

    def _ended(self, status: str) -> Event:
        self._response["status"] = status
        return self._event(f"response.{status}", response=self.response)

    def _event(self, kind: str, **members: Any) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **members}


def _usage(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": min(num_reasoning_tokens, usage.num_output_tokens)},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(24)
