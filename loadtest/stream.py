"""StreamReader: what one streamed completion brings, and when."""

from __future__ import annotations

import json
from typing import Any

from loadtest.record import Failure, RequestRecord
from loadtest.sse import EventSplitter


class StreamReader:
    """Reads the body of one streamed completion or chat completion into a record.

    Called with each piece of the body and its time, so it can be the sink of an exchange. What counts as output is a
    chunk with a choice in it, but for two that carry no token: chat's opening delta, which only names the role, and a
    last chunk that has nothing but a finish reason.
    """

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._events = EventSplitter()
        self._finish_reason: str | None = None
        self._error: Failure | None = None

    def __call__(self, data: bytes, now_s: float) -> None:
        """Take a piece of the body. Raises ValueError when an event is not a JSON object."""
        for payload in self._events.feed(data):
            if payload != b"[DONE]":
                self._read(_object(payload), now_s)

    def close(self, now_s: float) -> None:
        """The response has ended: settle the counts, and whether it was whole."""
        record = self._record
        record.finished_s = now_s
        if record.counted_by == "chunks":
            record.num_output_tokens = len(record.chunk_times_s)
        record.failure = self._error
        if record.failure is None and self._finish_reason is None:
            record.failure = Failure("truncated", "the stream ended without a finish_reason")

    def _read(self, chunk: dict[str, Any], now_s: float) -> None:
        if "error" in chunk:
            self._error = Failure("error event", _message(chunk["error"]))
            return
        for choice in chunk.get("choices") or ():
            finish_reason = choice.get("finish_reason")
            self._finish_reason = finish_reason or self._finish_reason
            if _text(choice) or not (finish_reason or _only_names_role(choice)):
                self._record.chunk_times_s.append(now_s)
        if usage := chunk.get("usage"):
            self._read_usage(usage)

    def _read_usage(self, usage: dict[str, Any]) -> None:
        record = self._record
        record.num_prompt_tokens = usage.get("prompt_tokens", record.num_prompt_tokens)
        record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        record.num_output_tokens = usage["completion_tokens"]
        record.counted_by = "usage"


def _object(payload: bytes) -> dict[str, Any]:
    value = json.loads(payload.decode())  # of bytes, it would first guess their encoding
    if not isinstance(value, dict):
        raise ValueError(f"an event is not a JSON object: {payload[:80]!r}")
    return value


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or ""


def _only_names_role(choice: dict[str, Any]) -> bool:
    return "role" in (choice.get("delta") or {}) and not _text(choice)


def _message(error: object) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
