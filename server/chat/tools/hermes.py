"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as many as there are calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from server.chat.said import Call
from server.chat.tools.format import Begun, Brackets, EndFinder, call_of, read_json, usual_head

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(re.escape(_OPEN) + usual_head("arguments"))


class Hermes:
    """See Format."""

    name = "hermes"
    marks: Sequence[str] = (_OPEN,)
    is_anywhere = True
    blanks = " \t\r\n"
    has_special_marks = False

    def finder(self, mark: str) -> EndFinder:
        """See Format."""
        return _CloseFinder()

    def begun(self, head: str) -> Begun | None:
        """See Format."""
        return Begun.of(_HEAD.match(head))

    def parse(self, block: str) -> list[Call]:
        """See Format. A model may end its turn without the closing tag."""
        return [call_of(read_json(block.removeprefix(_OPEN).removesuffix(_CLOSE)))]


class _CloseFinder:
    """Finds the closing tag, not the same characters in an argument."""

    def __init__(self) -> None:
        self._brackets = Brackets()
        self._tail = ""

    def feed(self, text: str) -> int | None:
        for i, character in enumerate(text):
            self._brackets.closes(character)
            self._tail = "" if self._brackets.quote else (self._tail + character)[-len(_CLOSE) :]
            if self._tail == _CLOSE:
                return i + 1
        return None
