"""Pythonic: the message is a list of calls in Python, `[search(query="x", limit=3), now()]`, of constants only.

Python parses it; nothing is run.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence

from server.chat.said import Call
from server.chat.tools.format import Begun, Brackets, EndFinder, arguments_text


class Pythonic:
    """See Format."""

    name = "pythonic"
    marks: Sequence[str] = ("[",)
    is_anywhere = False
    blanks = " \t\r\n"
    has_special_marks = False

    def finder(self, mark: str) -> EndFinder:
        """See Format."""
        return _ListFinder()

    def begun(self, head: str) -> Begun | None:
        """See Format. Arguments in Python are no JSON before all of them are there."""
        return None

    def parse(self, block: str) -> list[Call]:
        """See Format."""
        try:
            with warnings.catch_warnings(action="ignore"):  # of "\d" and the like, which is the model's to mend
                parsed = ast.parse(block, mode="eval").body
            if not isinstance(parsed, ast.List):
                raise ValueError("no list of calls")
            return [_call_of(element) for element in parsed.elts]
        except (SyntaxError, MemoryError) as error:  # MemoryError: nested too deep for the parser
            raise ValueError(str(error)) from error


def _call_of(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no named argument: **")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return Call(ast.unparse(node.func), arguments_text(arguments))


class _ListFinder:
    """Finds the end of a list that begins with a call, or that it does not."""

    def __init__(self) -> None:
        self._brackets = Brackets(quotes="'\"")
        self._brackets.closes("[")

    def feed(self, text: str) -> int | None:
        for i, character in enumerate(text):
            is_name = self._brackets.depth == 1 and not self._brackets.quote
            if is_name and not (character.isalnum() or character.isspace() or character in "_.,(]"):
                return i  # a list of something else, or a link
            if self._brackets.closes(character):
                return i + 1
        return None
