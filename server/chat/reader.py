"""How an answer's text is to be read: thoughts first, then content and calls."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from server.chat.reasoning import ThinkReader
from server.chat.said import Said
from server.chat.tools.format import Format
from server.chat.tools.reader import CallReader


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are to be read."""

    thinks: bool = False
    """Thoughts may come first."""
    is_thinking: bool = False
    """The prompt has opened them already."""
    tool_format: Format | None = None
    """How calls of tools are written; None if there are no tools to call."""
    tool_names: frozenset[str] = frozenset()
    has_parallel_calls: bool = True

    def reader(self) -> Reader:
        """For one choice."""
        return Reader(self)

    def new_call_id(self) -> str:
        """An id for a call. Mistral's templates take only such short ones."""
        return secrets.token_hex(5)[:9] if self.tool_format and self.tool_format.has_special_marks else _long_id()


class Reader:
    """Reads one choice's text as it comes. What it tells, summed, is the same wherever the text is cut."""

    def __init__(self, reading: Reading) -> None:
        self._thoughts = ThinkReader(is_thinking=reading.is_thinking) if reading.thinks else None
        self._calls = (
            CallReader(reading.tool_format, reading.tool_names, is_parallel=reading.has_parallel_calls)
            if reading.tool_format
            else None
        )

    def feed(self, text: str) -> Said:
        """What is sure to be said by the text so far and was not told before."""
        return self._with_calls(self._thoughts.feed(text) if self._thoughts else Said(text))

    def flush(self) -> Said:
        """What was held back, now that nothing follows."""
        said = self._with_calls(self._thoughts.flush()) if self._thoughts else Said()
        return said + self._calls.flush() if self._calls else said

    @property
    def is_in_call(self) -> bool:
        """Whether a call has been told of which the end has not come."""
        return self._calls is not None and self._calls.is_in_call

    def _with_calls(self, said: Said) -> Said:
        return Said(reasoning=said.reasoning) + self._calls.feed(said.content) if self._calls else said


def _long_id() -> str:
    return "call_" + secrets.token_hex(12)
