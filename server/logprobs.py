"""Logprobs in JSON: the two shapes of OpenAI's API, and vLLM's for prompts. Pure.

A token that is a part of a character has no text. OpenAI writes its bytes: `bytes:\\xe2\\x80` for completions, and
`\\xe2\\x80` for chat, which has the bytes as numbers, too. So tokens that differ are written differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.plan import TokenLogprobs
from engine.text.tokenizer import Tokenizer
from server.reports import ReportedToken


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[ReportedToken], num_top: int) -> dict[str, Any]:
    """The `logprobs` of a /v1/completions choice; those of a stream's chunks, joined, are the full answer's."""
    return {
        "tokens": [_text(tokenizer.token_bytes(token.token_id), prefix="bytes:") for token in tokens],
        "token_logprobs": [None if token.logprobs is None else token.logprobs.logprob for token in tokens],
        "top_logprobs": [_by_text(tokenizer, token.logprobs, num_top) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[ReportedToken], num_top: int) -> dict[str, Any]:
    """The `logprobs` of a /v1/chat/completions choice."""
    content = []
    for token in tokens:
        assert token.logprobs is not None, "chats are not echoed"
        hidden = tokenizer.special_token_ids - {token.token_id} | ({token.token_id} if not token.is_shown else set())
        own, *top = (
            _chat_token(tokenizer, token_id, logprob, is_shown=token_id not in hidden)
            for token_id, logprob in ((token.token_id, token.logprobs.logprob), *token.logprobs.top[:num_top])
        )
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the token that stands there first; null for the prompt's first."""
    return [None, *(_by_id(tokenizer, entry, num_top) for entry in entries)]


def _by_text(tokenizer: Tokenizer, entry: TokenLogprobs | None, num_top: int) -> dict[str, float] | None:
    if entry is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top[:num_top], (entry.token_id, entry.logprob)):
        # Two tokens may have one text (a special one and its plain spelling): the likelier stands for both.
        top.setdefault(_text(tokenizer.token_bytes(token_id), prefix="bytes:"), logprob)
    return top


def _by_id(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    others = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], start=1)]
    tokens = [(entry.token_id, entry.logprob, entry.rank), *(each for each in others if each[0] != entry.token_id)]
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token_id).decode(errors="replace"),
        }
        for token_id, logprob, rank in tokens
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float, *, is_shown: bool) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token_id)
    return {"token": _text(piece), "logprob": logprob, "bytes": list(piece) if is_shown else None}


def _text(piece: bytes, prefix: str = "") -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in piece)
