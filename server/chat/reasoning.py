"""`<think>...</think>` at the beginning of an answer -> reasoning apart from content, as the text comes."""

from __future__ import annotations

from engine.params import FreePrefix
from server.chat.said import Said, overlap

_OPEN, _CLOSE = "<think>", "</think>"


def opens_thoughts(prompt_end: str) -> bool:
    """Whether the prompt has opened the thoughts already, as some chat templates do."""
    return prompt_end.rstrip().endswith(_OPEN)


def thoughts_before_form(*, is_thinking: bool) -> FreePrefix:
    """Thoughts as the engine knows them: free text, with what has a form behind it. `is_thinking`: see ThinkReader."""
    return FreePrefix(end=_CLOSE) if is_thinking else FreePrefix(end=_CLOSE, begin=_OPEN)


class ThinkReader:
    """Takes thoughts apart from content. Both keep every character but the tags; nothing is told twice.

    Thoughts come first or not at all: a tag in the midst of an answer is content. Thoughts that never end are thoughts.
    """

    def __init__(self, *, is_thinking: bool) -> None:
        """`is_thinking`: the prompt has opened the thoughts."""
        self._is_thinking = is_thinking
        self._may_open = not is_thinking
        self._held = ""

    def feed(self, text: str) -> Said:
        """What is sure to be said by the text so far and was not told before."""
        text = self._held + text
        self._held = ""
        if self._may_open:
            begin = text.lstrip()
            if begin != _OPEN and _OPEN.startswith(begin):  # as an empty one does
                self._held = text
                return Said()
            self._may_open = False
            self._is_thinking = begin.startswith(_OPEN)
            text = text.replace(_OPEN, "", 1) if self._is_thinking else text
        if not self._is_thinking:
            return Said(content=text)
        thoughts, tag, content = text.partition(_CLOSE)
        if tag:
            self._is_thinking = False
            return Said(content, thoughts)
        sure = len(text) - overlap(text, _CLOSE)
        self._held = text[sure:]
        return Said(reasoning=text[:sure])

    def flush(self) -> Said:
        """What was held back in case that a tag came."""
        held, self._held = self._held, ""
        return Said(reasoning=held) if self._is_thinking else Said(content=held)
