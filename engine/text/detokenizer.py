"""Tokens to text, a few at a time: whole characters as soon as they are there, each token's work done once.

Joined, the pieces are what `Tokenizer.decode` makes of all the tokens at once. A character whose bytes are spread over
several tokens is held back until it is complete; nothing else is, so text without spaces streams as it comes. Bytes
that turn out to be no character are shown as U+FFFD, as `decode` does, never bytes that are still to come.

With one difference, on purpose. If a SentencePiece model spells out bytes that are not UTF-8, `decode` turns *all*
bytes of that row of byte tokens into U+FFFD, good characters too, even those that were complete long before. Text that
has been shown cannot be taken back, and need not be: here the good characters stay, and each bad byte becomes U+FFFD.

`tokenizers.decoders.DecodeStream` is the obvious tool for this, and is not used: it raises on that same case, decodes
a run of skipped special tokens anew with each of them (8000: seconds), and cannot give out at the end what it held.

*The start.* SentencePiece marks words by a space in front, and `decode` drops it from the first. Of a text that goes on
after a prompt it must stay. So give the prompt: then the text is what comes after the prompt's text (as vLLM has it),
and a character that the prompt left incomplete can be completed. Without it the text is taken to start here.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import islice

from engine.text.pieces import Pieces
from engine.text.tokenizer import Tokenizer

_MAX_CHAR_BYTES = 4
_MAX_HELD_TOKENS = 4  # a character has at most four bytes, a token at least one
_MAX_CONTEXT_TOKENS = 4


class Detokenizer:
    """The text of one request's output, as its tokens come. Not for two threads at once."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """`prompt_token_ids`: what the output follows; only its end is looked at."""
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        visible_prompt = (i for i in reversed(prompt_token_ids) if i not in self._hidden)
        self._decoder: _ByteDecoder | _WindowDecoder
        if tokenizer.pieces is not None:
            self._decoder = _ByteDecoder(tokenizer.pieces, visible_prompt)
        else:
            self._decoder = _WindowDecoder(tokenizer, visible_prompt)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete. Ids outside the vocabulary have no text."""
        return self._decoder.feed([i for i in token_ids if i not in self._hidden])

    def flush(self) -> str:
        """No more tokens come: what was held back, bytes of unfinished characters as U+FFFD."""
        return self._decoder.flush()


class _ByteDecoder:
    """For tokens that stand for bytes: a table and a UTF-8 decoder that remembers the unfinished character."""

    def __init__(self, pieces: Pieces, prompt_backwards: Iterable[int]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(pieces.errors)
        tail = b""
        for token_id in prompt_backwards:
            tail = pieces[token_id] + tail
            if len(tail) >= _MAX_CHAR_BYTES:  # an unfinished character is shorter
                break
        self._decoder.decode(tail)
        self._strip_space = pieces.strip_space and not tail

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._strip(self._decoder.decode(b"".join([pieces[i] for i in token_ids])))

    def flush(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


class _WindowDecoder:
    """For all other decoders (WordPiece, Metaspace ...), whose tokens' text depends on the token before.

    New tokens are decoded together with the last ones shown, and what these alone give is taken off.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_backwards: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._context = [*islice(prompt_backwards, _MAX_CONTEXT_TOKENS)][::-1]
        """The last tokens shown."""
        self._held: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        known = [token_id for token_id in token_ids if 0 <= token_id < self._tokenizer.vocab_size]
        return "".join([self._feed(token_id) for token_id in known])

    def flush(self) -> str:
        return self._show(self._decode(self._context + self._held))

    def _feed(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith("\ufffd") and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        """The end of `text`, the decoded context and held tokens, that the context alone does not give."""
        new = text[_common_length(self._decode(self._context), text) :]
        # Tokens without text of their own stay beside what was shown last: they may be what the text began with.
        self._context = self._held if new else (self._context + self._held)[-_MAX_CONTEXT_TOKENS:]
        self._held = []
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _common_length(a: str, b: str) -> int:
    """How many characters the two begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
