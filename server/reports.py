"""What an answer says beside its text: logprobs and token ids, gathered choice by choice as the chunks come.

    Chunk --Reporter.take--> ... --Reporter.flush--> Report: what is new since the last, in a stream's next event

A full answer's report is the sum of a stream's. Knows no JSON; `logprobs` has the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.client import Chunk
from engine.plan import TokenLogprobs
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from server.convert import Echo, Generation, Reports


@dataclass(frozen=True, slots=True)
class ReportedToken:
    """A token of the text (of an echoed prompt, too) and how likely it was."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt."""
    offset: int
    """Where in the text it begins, in characters."""
    is_shown: bool
    """It adds to the text. Special tokens do not, nor does the one that ended the text."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one choice says beside its text; empty where it was not asked."""

    tokens: tuple[ReportedToken, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    """In a choice's first report."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Without an entry for the first token."""

    def __add__(self, later: Report) -> Report:
        return Report(
            self.tokens + later.tokens,
            self.token_ids + later.token_ids,
            self.prompt_token_ids + later.prompt_token_ids,
            self.prompt_logprobs + later.prompt_logprobs,
        )


class Reporter:
    """Gathers the reports of one choice."""

    def __init__(self, tokenizer: Tokenizer, generation: Generation, wanted: Reports) -> None:
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._generation = generation
        self._hidden = tokenizer.special_token_ids if generation.params.skip_special_tokens else frozenset()
        self._offsets = _OutputOffsets(tokenizer, generation)
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._tokens: list[ReportedToken] = []
        self._token_ids: list[int] = []
        self._is_first = True
        self._sum, self._count = 0.0, 0

    @property
    def mean_logprob(self) -> float:
        """Of the tokens so far; of none, that of a certain one."""
        return self._sum / max(self._count, 1)

    def take(self, chunk: Chunk) -> None:
        """Take in a chunk."""
        self._prompt_logprobs += chunk.prompt_logprobs
        self._token_ids += chunk.token_ids
        self._sum += sum(entry.logprob for entry in chunk.logprobs)
        self._count += len(chunk.logprobs)
        if self._wanted.logprobs is not None:
            self._tokens += self._reported(chunk)

    def flush(self) -> Report:
        """What has come since the last time. The first time, all of the prompt's logprobs must have come."""
        wanted, generation = self._wanted, self._generation
        tokens, token_ids = tuple(self._tokens), tuple(self._token_ids)
        self._tokens, self._token_ids = [], []
        is_first, self._is_first = self._is_first, False
        if is_first and generation.echo is not None and wanted.logprobs is not None:
            tokens = (*self._reported_prompt(generation.echo), *tokens)
        return Report(
            tokens=tokens,
            token_ids=token_ids if wanted.token_ids else (),
            prompt_token_ids=tuple(generation.prompt_token_ids) if is_first and wanted.token_ids else (),
            prompt_logprobs=tuple(self._prompt_logprobs) if is_first and wanted.prompt_logprobs is not None else (),
        )

    def _reported(self, chunk: Chunk) -> list[ReportedToken]:
        tokens = [
            ReportedToken(entry.token_id, entry, self._offsets.next(entry.token_id), entry.token_id not in self._hidden)
            for entry in chunk.logprobs
        ]
        if tokens and chunk.hides_last_token:
            tokens[-1] = replace(tokens[-1], is_shown=False)
        return tokens

    def _reported_prompt(self, echo: Echo) -> list[ReportedToken]:
        token_ids = self._generation.prompt_token_ids
        entries = [None, *self._prompt_logprobs]
        hidden = frozenset() if echo.is_clients else self._hidden
        places = _prompt_offsets(self._tokenizer, token_ids, echo, hidden)
        return [
            ReportedToken(token_id, entry, offset, token_id not in hidden)
            for token_id, entry, offset in zip(token_ids, entries, places, strict=True)
        ]


class _OutputOffsets:
    """Where in the text the tokens of the output begin, one after another."""

    def __init__(self, tokenizer: Tokenizer, generation: Generation) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=generation.params.skip_special_tokens,
            prompt_token_ids=generation.prompt_token_ids,
        )
        self._offset = 0 if generation.echo is None else len(generation.echo.text)

    def next(self, token_id: int) -> int:
        """The offset of the next token, which is this."""
        offset = self._offset
        self._offset += len(self._detokenizer.feed((token_id,)))
        return offset


def _prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], echo: Echo, hidden: frozenset[int]) -> list[int]:
    """Where in an echoed prompt its tokens begin."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=bool(hidden))
    offsets, offset = [], 0
    for i, token_id in enumerate(token_ids):
        offsets.append(offset)
        if i == 0 and _is_added(tokenizer, token_id, echo):
            continue
        offset += len(detokenizer.feed((token_id,)))
    return offsets


def _is_added(tokenizer: Tokenizer, first: int, echo: Echo) -> bool:
    """Whether a prompt's first token is a begin-of-text token that the client's text has not."""
    is_begin = echo.is_clients and first == tokenizer.bos_token_id
    return is_begin and not echo.text.startswith(tokenizer.token_bytes(first).decode())
