"""Text and chats -> token ids, without holding up the event loop.

A millisecond of tokenising for each 4000 characters is a millisecond in which no stream gets its token, so long texts
go to a worker thread (the tokenizer lets the interpreter go on meanwhile). One at a time: the cores are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer

LONG_TEXT_LEN = 8_000
"""What has this many characters, or more, goes to the worker thread."""

LONG_CHAT_LEN = 50
"""Chats of this many messages, or more, do so too: templates are interpreted."""

_CHARS_PER_TOKEN = 16
"""No language has as many on average: a text this many times longer than the context is probably too long for it."""

_T = TypeVar("_T")


class PromptEncoder:
    """Makes prompts for one model. Event loop only; works in at most one other thread."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._worker = anyio.CapacityLimiter(1)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each text. Raises RequestError for one that is not Unicode or far too long."""
        is_long = sum(map(len, texts)) >= LONG_TEXT_LEN
        return await self._run(is_long, lambda: [self._encode(text, add_special_tokens) for text in texts])

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, template_kwargs: Mapping[str, Any], add_special_tokens: bool
    ) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins.

        `messages` as `chat.messages.to_template` makes them. Raises RequestError, also with the template's own words.
        """

        def render_and_encode() -> list[int]:
            text = self._tokenizer.render_chat(messages, template_kwargs=template_kwargs)
            return self._encode(text, add_special_tokens)

        num_chars = sum(len(part["text"]) for message in messages for part in message.get("content", ()))
        return await self._run(len(messages) >= LONG_CHAT_LEN or num_chars >= LONG_TEXT_LEN, render_and_encode)

    async def _run(self, is_long: bool, work: Callable[[], _T]) -> _T:
        return await anyio.to_thread.run_sync(work, limiter=self._worker) if is_long else work()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Refuses a text that is far too long by its beginning: that must not cost as much as reading it."""
        enough = self._max_model_len * _CHARS_PER_TOKEN
        if len(text) > enough:
            num_tokens = len(self._tokenizer.encode(text[:enough], add_special_tokens=add_special_tokens))
            if num_tokens > self._max_model_len + _CHARS_PER_TOKEN:  # the cut may have split a few tokens
                raise RequestError(
                    f"the prompt has more than {num_tokens} tokens; the context length is {self._max_model_len}",
                    param="prompt",
                    code="context_length_exceeded",
                )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
