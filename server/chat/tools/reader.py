"""Text -> content and calls, as it comes, whatever the format.

A call is told as soon as it is sure to be one: when its name is known, is that of a tool, and its arguments begin. From
there on they are told as they come, as the model writes them. Where the text does not say as much (arguments that come
before the name, are in Python, or in an array), a call is told when it is whole.

So a call that is cut off has arguments that are cut off; the answer's finish reason says so. A call that is told whole
is content if it is cut off, or malformed.
"""

from __future__ import annotations

from collections.abc import Container

from server.chat.said import Call, Said, overlap
from server.chat.tools.format import Begun, Brackets, EndFinder, Format

_MAX_HEAD_LEN = 512
"""Characters of a block within which arguments that are told as they come must begin."""


class CallReader:
    """Takes calls apart from content. What is malformed, unfinished or names no tool stays content, as it was written.

    What is lost is blanks before, between and after calls, and the calls' own syntax.
    """

    def __init__(self, format: Format, names: Container[str], *, is_parallel: bool = True) -> None:
        """`names`: of the tools. Without `is_parallel`, calls after the first are left out."""
        self._format = format
        self._names = names
        self._is_parallel = is_parallel
        self._has_called = False
        self._is_start = True
        """A block may begin here, blanks aside."""
        self._held = ""
        """Outside of blocks: not told yet, as a mark may come of it. Blanks before a block, within one."""
        self._finder: EndFinder | None = None
        """Within a block."""
        self._block: list[str] = []
        self._head: str | None = None
        """The block's first characters, while a call may begin in them."""
        self._arguments: Brackets | None = None
        """Within arguments that are told as they come."""
        self._is_told = False
        """The block's call has been told, or begun to be."""

    @property
    def is_in_call(self) -> bool:
        """Whether a call has been told of which the end has not come."""
        return self._arguments is not None

    def feed(self, text: str) -> Said:
        """What is sure to be said by the text so far and was not told before."""
        said = Said()
        while text:
            more, text = self._outside(text) if self._finder is None else self._inside(self._finder, text)
            said += more
        return said

    def flush(self) -> Said:
        """What was held back, now that nothing follows."""
        if self._finder is not None:
            return self._close()
        held, self._held = self._held, ""
        is_blank = self._is_start and not held.strip(self._format.blanks)
        return Said() if is_blank and self._has_called else Said(content=held)

    def _outside(self, text: str) -> tuple[Said, str]:
        """What is said before the next block, and the text that is left for it."""
        text, self._held = self._held + text, ""
        if self._is_start:
            begin = text.lstrip(self._format.blanks)
            for mark in self._format.marks:
                if begin.startswith(mark):
                    self._open(mark, text[: len(text) - len(begin)])
                    return Said(), begin[len(mark) :]
                if mark.startswith(begin):  # as an empty one does
                    self._held = text
                    return Said(), ""
            self._is_start = False
        if not self._format.is_anywhere:
            return Said(content=text), ""
        (mark,) = self._format.marks
        content, found, rest = text.partition(mark)
        if found:
            self._open(mark, "")
            return Said(content=content), rest
        sure = len(text) - overlap(text, mark)
        self._held = text[sure:]
        return Said(content=text[:sure]), ""

    def _open(self, mark: str, blanks: str) -> None:
        self._held = blanks
        self._finder = self._format.finder(mark)
        self._block = [mark]
        self._head = mark if self._is_parallel or not self._has_called else None
        self._arguments, self._is_told = None, False

    def _inside(self, finder: EndFinder, text: str) -> tuple[Said, str]:
        """What is said by a block that ends here, and the text after it."""
        length = finder.feed(text)
        said = self._in_block(text[:length])
        return (said, "") if length is None else (said + self._close(), text[length:])

    def _in_block(self, text: str) -> Said:
        """What the next characters of a block say before it is whole."""
        if self._is_told:
            return self._more_arguments(None, text)
        self._block.append(text)
        if self._head is None:
            return Said()
        length = len(self._head)
        self._head += text[: _MAX_HEAD_LEN - length]
        begun = self._format.begun(self._head)
        if begun is not None and begun.name in self._names:
            return self._begin(begun, length, text)
        if begun is not None or len(self._head) == _MAX_HEAD_LEN:
            self._head = None
        return Said()

    def _begin(self, begun: Begun, length: int, text: str) -> Said:
        """What the call says whose arguments begin in `text`, which follows the block's first `length` characters."""
        self._is_told = self._has_called = True
        self._arguments = Brackets()
        return self._more_arguments(begun.name, text[begun.offset - length :])

    def _more_arguments(self, name: str | None, text: str) -> Said:
        """What is said by the next characters of a block whose call is told as it comes."""
        if self._arguments is None:
            return Said()  # the call's own syntax, behind the arguments
        for i, character in enumerate(text):
            if self._arguments.closes(character):
                self._arguments = None
                text = text[: i + 1]
                break
        return Said(calls=(Call(name, text),)) if text else Said()

    def _close(self) -> Said:
        """What the block says."""
        block, self._block, self._finder = "".join(self._block), [], None
        blanks, self._held = self._held, ""
        if self._is_told:
            self._is_start = True
            return Said()
        calls = self._calls_of(block)
        self._is_start = bool(calls)
        if not calls:
            return Said(content=blanks + block)
        if not self._is_parallel:
            calls = [] if self._has_called else calls[:1]
        self._has_called = True
        return Said(calls=tuple(calls))

    def _calls_of(self, block: str) -> list[Call]:
        """The block's calls; none if any of it is malformed."""
        try:
            calls = self._format.parse(block)
        except (ValueError, RecursionError):
            return []
        return calls if all(call.name in self._names for call in calls) else []
