"""What each token adds to the text, as bytes: so that text can be made token by token, exactly.

Nearly all language models have one of two kinds of decoder, and in both a token stands for bytes that do not depend on
its neighbours: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece with byte fallback (Llama 2, Mistral,
Gemma). The text is those bytes, joined and read as UTF-8.

A table is trusted only after its text has been compared with the tokenizer's own over the whole vocabulary.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_CHECKED_AT_ONCE = 512


EACH_BYTE = "chairlift.replace_each_byte"
"""Like "replace", but with one U+FFFD for each byte, not for each run of them: as the ByteFallback decoder does."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The bytes of each token, and how they are read."""

    by_id: tuple[bytes, ...]
    """Bytes of each token; ids past the end, and holes, have none."""
    strip_space: bool = False
    """A space at the very start of the text is not shown (SentencePiece puts one there)."""
    errors: str = "replace"
    """How bytes that are not UTF-8 are read, as `bytes.decode` names it."""

    def __getitem__(self, token_id: int) -> bytes:
        return self.by_id[token_id] if 0 <= token_id < len(self.by_id) else b""

    @classmethod
    def of(cls, backend: Backend) -> Pieces | None:
        """The pieces of a tokenizer's tokens; None if its decoder is of another kind, or is not as it seems."""
        if backend.decoder is None:
            return None
        steps = _steps(json.loads(backend.decoder.__getstate__()))
        size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        tokens = [backend.id_to_token(i) or "" for i in range(size)]
        if [step["type"] for step in steps] == ["ByteLevel"]:
            pieces = _byte_level(tokens)
        elif _is_sentencepiece(steps):
            pieces = _sentencepiece(tokens, steps)
        else:
            return None
        return pieces if _agrees(pieces, backend) else None


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder's description as the list of its steps."""
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    """Whether this is Replace, ByteFallback, Fuse and perhaps Strip of one leading space."""
    replace, strip = steps[0], steps[3:]
    return (
        [step["type"] for step in steps[:3]] == ["Replace", "ByteFallback", "Fuse"]
        and "String" in replace["pattern"]
        and (not strip or strip == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}])
    )


def _sentencepiece(tokens: list[str], steps: list[dict[str, Any]]) -> Pieces:
    pattern, content = steps[0]["pattern"]["String"], steps[0]["content"]
    by_id = tuple(
        bytes.fromhex(byte[1]) if (byte := _BYTE_TOKEN.fullmatch(token)) else token.replace(pattern, content).encode()
        for token in tokens
    )
    return Pieces(by_id, strip_space=len(steps) == 4, errors=EACH_BYTE)


def _byte_level(tokens: list[str]) -> Pieces:
    byte_of = _bytes_of_characters()
    return Pieces(tuple(_map(token, byte_of) for token in tokens))


def _map(token: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes([byte_of[char] for char in token])
    except KeyError:  # an added token, written in plain characters
        return token.encode()


def _bytes_of_characters() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's `bytes_to_unicode`), the other way."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _agrees(pieces: Pieces, backend: Backend) -> bool:
    """Whether the text of all tokens, a few hundred at a time, is what the tokenizer itself makes of them.

    SentencePiece's tokens for the bytes of split characters are left out: in a row they are no text, and of that the
    two make different things on purpose (see `detokenizer`).
    """
    ids = [i for i, piece in enumerate(pieces.by_id) if not (pieces.errors == EACH_BYTE and _is_part(piece))]
    for start in range(0, len(ids), _CHECKED_AT_ONCE):
        some = ids[start : start + _CHECKED_AT_ONCE]
        text = b"".join(pieces[i] for i in some).decode(errors=pieces.errors)
        if pieces.strip_space:
            text = text.removeprefix(" ")
        if text != backend.decode(some, skip_special_tokens=False):
            return False
    return True


def _is_part(piece: bytes) -> bool:
    """Whether this is one byte of a character of several."""
    return len(piece) == 1 and piece >= b"\x80"
