"""Long texts are encoded elsewhere, and far too long ones hardly at all."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from server.chat.conversation import Conversation
from server.prompts import LONG_TEXT_LEN, PromptEncoder
from tests.factories_engine import FakeTokenizer

pytestmark = pytest.mark.anyio


class WatchedTokenizer(FakeTokenizer):
    """Knows where it was called, and with how much."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []
        self.lengths: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.get_ident())
        self.lengths.append(len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)


def make(max_model_len: int = 1_000_000) -> tuple[PromptEncoder, WatchedTokenizer]:
    tokenizer = WatchedTokenizer()
    return PromptEncoder(cast(Tokenizer, tokenizer), max_model_len=max_model_len), tokenizer


async def test_a_short_text_is_encoded_here_a_long_one_is_not() -> None:
    encoder, tokenizer = make()
    await encoder.encode(["x" * (LONG_TEXT_LEN - 1)], add_special_tokens=True)
    await encoder.encode(["x" * LONG_TEXT_LEN], add_special_tokens=True)
    here = threading.get_ident()
    assert [thread == here for thread in tokenizer.threads] == [True, False]


async def test_many_short_texts_are_together_a_long_one() -> None:
    encoder, tokenizer = make()
    assert await encoder.encode(["a", "bc"] * (LONG_TEXT_LEN // 3 + 1), add_special_tokens=False)
    assert threading.get_ident() not in tokenizer.threads


async def test_chats_are_rendered_elsewhere_and_encoded_here_unless_they_are_long() -> None:
    rendered_in: list[int] = []

    class Rendering(WatchedTokenizer):
        def render_chat(self, *args: Any, **kwargs: Any) -> str:
            rendered_in.append(threading.get_ident())
            return super().render_chat(*args, **kwargs)

    tokenizer = Rendering()
    encoder = PromptEncoder(cast(Tokenizer, tokenizer), max_model_len=1_000_000)
    here = threading.get_ident()
    for length, is_encoded_here in ((1, True), (LONG_TEXT_LEN, False)):
        message = {"role": "user", "content": [{"text": "x" * length}]}
        await encoder.encode_chat(Conversation([message]), add_special_tokens=False)
        assert rendered_in.pop() != here
        assert (tokenizer.threads.pop() == here) == is_encoded_here


async def test_a_template_that_does_not_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.prompts.MAX_TEMPLATE_S", 0.1)
    ended = threading.Event()

    class Endless(FakeTokenizer):
        def render_chat(self, *args: Any, **kwargs: Any) -> str:
            try:
                while True:
                    pass
            finally:
                ended.set()

    encoder = PromptEncoder(cast(Tokenizer, Endless()), max_model_len=100)
    with pytest.raises(RequestError, match=r"longer than 0.1 s") as caught:
        await encoder.encode_chat(Conversation([{"role": "user"}]), add_special_tokens=False)
    assert caught.value.param == "messages"
    assert ended.wait(10)


async def test_of_a_text_that_is_far_too_long_only_the_beginning_is_read() -> None:
    encoder, tokenizer = make(max_model_len=1000)
    with pytest.raises(RequestError, match="more than 16001 tokens; the context length is 1000") as caught:
        await encoder.encode(["x" * 10_000_000], add_special_tokens=True)
    assert caught.value.code == "context_length_exceeded"
    assert tokenizer.lengths == [16_000]


async def test_a_long_text_of_few_tokens_is_read_whole() -> None:
    class Sparing(WatchedTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text)[::100]

    encoder = PromptEncoder(cast(Tokenizer, Sparing()), max_model_len=1000)
    (token_ids,) = await encoder.encode(["x" * 50_000], add_special_tokens=False)
    assert len(token_ids) == 501
