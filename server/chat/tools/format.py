"""What a way of writing calls consists of, and what the ways have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from server.chat.said import Call


class EndFinder(Protocol):
    """Finds the end of a block of calls as its text comes."""

    def feed(self, text: str) -> int | None:
        """How many of the next characters still belong to the block, which ends (or breaks) there; None: all."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A call whose name is known and whose arguments, a JSON object as it stands, have begun."""

    name: str
    offset: int
    """Where in the block the arguments begin."""

    @classmethod
    def of(cls, match: re.Match[str] | None) -> Begun | None:
        """By a match whose first group is the name, and that ends before the arguments."""
        return None if match is None else cls(match[1], match.end())


def usual_head(arguments_name: str) -> str:
    """A pattern for the beginning of a call in its usual form, up to its arguments."""
    return rf'\s*\{{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:{arguments_name})"\s*:\s*(?=\{{)'


class Format(Protocol):
    """A way of writing calls: blocks that begin with a mark. Stateless; shared by all answers."""

    name: str
    marks: Sequence[str]
    """What a block begins with."""
    is_anywhere: bool
    """Blocks may begin in the midst of content; else at the message's beginning, or after a block. Then it has one
    mark."""
    blanks: str
    """Characters that may stand before and between blocks and say nothing."""
    has_special_marks: bool
    """The marks are special tokens, which are no text unless asked for."""

    def finder(self, mark: str) -> EndFinder:
        """For the text that follows this mark."""

    def begun(self, head: str) -> Begun | None:
        """The call whose arguments begin in the first characters of a block; None if none is known to, yet or ever."""

    def parse(self, block: str) -> list[Call]:
        """The calls of a block, from its mark to its end. Raises ValueError or RecursionError for what is none."""


class Brackets:
    """Follows brackets and strings through text, a character at a time."""

    def __init__(self, quotes: str = '"') -> None:
        self.depth = 0
        self.quote = ""
        """The mark that ends the string which the text is in; "" outside of strings."""
        self._quotes = quotes
        self._is_escaped = False

    def closes(self, character: str) -> bool:
        """Take the next character; whether it closes the outermost bracket."""
        if self.quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self.quote:
                self.quote = ""
        elif character in self._quotes:
            self.quote = character
        elif character in "[{(":
            self.depth += 1
        elif character in ")}]":
            self.depth -= 1
            return self.depth <= 0
        return False


def read_json(text: str) -> Any:
    """JSON without NaN and Infinity. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_refuse)


def call_of(value: Any, arguments_name: str = "arguments") -> Call:
    """A call in its usual form, `{"name": ..., "arguments": {...}}`. Raises ValueError for anything else."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        raise ValueError("no call: it has no name")
    return Call(name, arguments_text(value.get(arguments_name, {})))


def arguments_text(arguments: Any) -> str:
    """Arguments as the API has them: a JSON object, as text. Raises ValueError if they are no such thing."""
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:  # Python has values that JSON has not
        raise ValueError(str(error)) from error
    text.encode()  # UnicodeEncodeError, a ValueError, for a lone surrogate
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
