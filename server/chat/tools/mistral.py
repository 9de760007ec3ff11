"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`.

Newer: `[TOOL_CALLS]name{...}` or `[TOOL_CALLS]name[ARGS]{...}`, for each call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from server.chat.said import Call
from server.chat.tools.format import Begun, Brackets, EndFinder, arguments_text, call_of, read_json

_MARK = "[TOOL_CALLS]"
_MAX_NAME_LEN = 128
_HEAD = re.compile(re.escape(_MARK) + r"\s*([^\s\[{]+)\s*(?:\[ARGS\])?\s*(?=\{)")


class Mistral:
    """See Format."""

    name = "mistral"
    marks: Sequence[str] = (_MARK,)
    is_anywhere = True
    blanks = " \t\r\n"
    has_special_marks = True

    def finder(self, mark: str) -> EndFinder:
        """See Format."""
        return _CallsFinder()

    def begun(self, head: str) -> Begun | None:
        """See Format. In an array, calls are told when all are there."""
        return Begun.of(_HEAD.match(head))

    def parse(self, block: str) -> list[Call]:
        """See Format."""
        body = block.removeprefix(_MARK).strip()
        if body.startswith("["):
            return [call_of(value) for value in read_json(body)]
        name, brace, rest = body.partition("{")
        return [Call(name.strip().removesuffix("[ARGS]").strip(), arguments_text(read_json(brace + rest)))]


class _CallsFinder:
    """Finds the end of an array, or of the object that follows a name."""

    def __init__(self) -> None:
        self._brackets = Brackets()
        self._name = ""

    def feed(self, text: str) -> int | None:
        for i, character in enumerate(text):
            if not self._brackets.depth and character != "{" and (character != "[" or self._name.strip()):
                self._name += character
                if len(self._name) > _MAX_NAME_LEN:
                    return i + 1  # no name: it breaks here
            elif self._brackets.closes(character):
                return i + 1
        return None
