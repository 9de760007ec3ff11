"""What a stretch of the model's text says: content, thoughts, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, or a part of one."""

    name: str | None
    """None: more of the arguments of the call before."""
    arguments: str
    """A JSON object, as text, when all parts are there."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a stretch of text says. That of a whole text is the sum of its stretches', wherever they are cut."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def __add__(self, later: Said) -> Said:
        return Said(self.content + later.content, self.reasoning + later.reasoning, _joined(self.calls, later.calls))

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def _joined(calls: tuple[Call, ...], later: tuple[Call, ...]) -> tuple[Call, ...]:
    """The calls of both, a call that goes on put together."""
    if calls and later and later[0].name is None:
        whole = Call(calls[-1].name, calls[-1].arguments + later[0].arguments)
        return (*calls[:-1], whole, *later[1:])
    return calls + later


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`; not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
