"""Text and chats -> token ids, without holding up the event loop.

A millisecond of tokenising for each 4000 characters is a millisecond in which no stream gets its token, so long texts
go to a worker thread (the tokenizer lets the interpreter go on meanwhile). One at a time: the cores are the engine's.
Chat templates always do, since they are programs: one that does not come to its end is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread

from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from server.chat.conversation import Conversation
from server.interruptible import run_interruptible
from server.limits import MAX_TEMPLATE_S

LONG_TEXT_LEN = 8_000
"""What has this many characters, or more, goes to the worker thread."""

_NUM_TEMPLATES = 4
"""Templates that are rendered at once. They take turns with the interpreter, but a slow one keeps no other waiting."""

_CHARS_PER_TOKEN = 16
"""No language has as many on average: a text this many times longer than the context is probably too long for it."""

_T = TypeVar("_T")


class PromptEncoder:
    """Makes prompts for one model. Event loop only; works in a few other threads."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int | None) -> None:
        """`max_model_len`: what is far longer is refused early; None takes texts of any length."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._worker = anyio.CapacityLimiter(1)
        self._templates = anyio.CapacityLimiter(_NUM_TEMPLATES)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each text. Raises RequestError for one that is not Unicode or far too long."""
        is_long = sum(map(len, texts)) >= LONG_TEXT_LEN
        return await self._run(is_long, lambda: [self._encode(text, add_special_tokens) for text in texts])

    async def encode_chat(self, conversation: Conversation, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a conversation, as its template writes it. Raises RequestError, also in its words."""
        try:
            text = await run_interruptible(
                lambda: conversation.render(self._tokenizer), timeout_s=MAX_TEMPLATE_S, limiter=self._templates
            )
        except TimeoutError:
            raise RequestError(
                f"the model's chat template takes longer than {MAX_TEMPLATE_S:g} s for these messages", param="messages"
            ) from None
        return (await self.encode([text], add_special_tokens=add_special_tokens))[0]

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens too."""
        is_long = len(token_ids) >= LONG_TEXT_LEN
        return await self._run(is_long, lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    async def _run(self, is_long: bool, work: Callable[[], _T]) -> _T:
        return await anyio.to_thread.run_sync(work, limiter=self._worker) if is_long else work()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Refuses a text that is far too long by its beginning: that must not cost as much as reading it."""
        if self._max_model_len is not None and len(text) > (enough := self._max_model_len * _CHARS_PER_TOKEN):
            num_tokens = len(self._tokenizer.encode(text[:enough], add_special_tokens=add_special_tokens))
            if num_tokens > self._max_model_len + _CHARS_PER_TOKEN:  # the cut may have split a few tokens
                raise RequestError(
                    f"the prompt has more than {num_tokens} tokens; the context length is {self._max_model_len}",
                    param="prompt",
                    code="context_length_exceeded",
                )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
