"""Llama 3: the message is `{"name": ..., "parameters": {...}}`; several are parted by `;`.

A `<|python_tag|>` may stand before it, where special tokens are text. An answer that is JSON of another kind is
content, once its end has shown that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from server.chat.said import Call
from server.chat.tools.format import Begun, Brackets, EndFinder, call_of, read_json, usual_head

_TAG = "<|python_tag|>"
_HEAD = re.compile(f"(?:{re.escape(_TAG)})?" + usual_head("arguments|parameters"))


class Llama3Json:
    """See Format."""

    name = "llama3_json"
    marks: Sequence[str] = ("{", _TAG)
    is_anywhere = False
    blanks = " \t\r\n;"
    has_special_marks = False

    def finder(self, mark: str) -> EndFinder:
        """See Format."""
        finder = _ObjectFinder()
        if mark == "{":
            finder.feed(mark)
        return finder

    def begun(self, head: str) -> Begun | None:
        """See Format."""
        return Begun.of(_HEAD.match(head))

    def parse(self, block: str) -> list[Call]:
        """See Format."""
        value = read_json(block.removeprefix(_TAG))
        has_parameters = isinstance(value, dict) and "parameters" in value
        return [call_of(value, "parameters" if has_parameters else "arguments")]


class _ObjectFinder:
    """Finds the end of an object, or that there is none."""

    def __init__(self) -> None:
        self._brackets = Brackets()

    def feed(self, text: str) -> int | None:
        for i, character in enumerate(text):
            if not self._brackets.depth and character != "{" and not character.isspace():
                return i  # some other use of the tag
            if self._brackets.closes(character):
                return i + 1
        return None
