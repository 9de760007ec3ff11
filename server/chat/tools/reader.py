"""Text -> content and calls, as it comes, whatever the format.

A call is told when it is whole: only then is it sure to be one, and what is none has to be told as content. (Clients
cannot run half a call either.) So arguments are valid JSON always, also where `max_tokens` cuts the text.
"""

from __future__ import annotations

from collections.abc import Container

from server.chat.said import Call, Said, overlap
from server.chat.tools.format import EndFinder, Format


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

    def _inside(self, finder: EndFinder, text: str) -> tuple[Said, str]:
        """What is said by a block that ends here, and the text after it."""
        length = finder.feed(text)
        self._block.append(text[:length])
        return (Said(), "") if length is None else (self._close(), text[length:])

    def _close(self) -> Said:
        """What the block says."""
        block, self._block, self._finder = "".join(self._block), [], None
        blanks, self._held = self._held, ""
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
