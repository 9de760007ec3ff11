"""RequestOutput: one request's engine events -> the Chunks its client sees. Detokenises and finds stop strings.

The same for `client` (streams) and `llm` (offline), so that both say the same of the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import Event, Failed, Finished, Submit, TokensOut
from engine.request import FinishReason
from engine.text.detokenizer import Detokenizer
from engine.text.stop import StopMatcher
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request so far."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    num_output_tokens: int
    """Tokens delivered; an end-of-text token counts, tokens made after a stop string do not."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one request has to say at one moment."""

    text: str
    """New text: whole characters, and never a part of a stop string. May be empty."""
    token_ids: tuple[int, ...]
    """The new tokens. Their text may still be held back."""
    usage: Usage
    finish_reason: FinishReason | None = None
    """STOP, LENGTH or ABORT, on the last chunk only."""
    stop_reason: str | int | None = None
    """The stop string or the id of the stop token that ended it; None for the model's own end-of-text token."""


class RequestOutput:
    """Turns the events of one request into chunks. One per request."""

    def __init__(self, tokenizer: Tokenizer, request: Submit) -> None:
        params = request.params
        self._request = request
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            prompt_token_ids=request.prompt_token_ids,
        )
        self._matcher = StopMatcher(params.stop, include_stop_str=params.include_stop_str_in_output)
        self._num_unstoppable = params.min_tokens
        """Tokens to come whose text ends nothing, whatever it holds."""
        self._num_cached_tokens = 0
        self._num_output_tokens = 0

    def take(self, events: Sequence[Event]) -> Chunk:
        """Take in the events of one request, in order, at least one; the last chunk has a `finish_reason`.

        A stop string in the text ends the output before the engine knows: the caller aborts the request then.
        Raises the error of a Failed.
        """
        token_ids: tuple[int, ...] = ()
        end: Finished | None = None
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            self._num_cached_tokens = event.num_cached_tokens
            if isinstance(event, TokensOut):
                token_ids += event.token_ids
            else:
                end = event
        self._num_output_tokens += len(token_ids)
        text = self._feed(token_ids, end)
        usage = Usage(len(self._request.prompt_token_ids), self._num_cached_tokens, self._num_output_tokens)
        if self._matcher.matched is not None:
            return Chunk(text, token_ids, usage, FinishReason.STOP, self._matcher.matched)
        if end is None:
            return Chunk(text, token_ids, usage)
        named = end.stop_token_id in self._request.params.stop_token_ids
        return Chunk(text, token_ids, usage, end.reason, end.stop_token_id if named else None)

    def _feed(self, token_ids: tuple[int, ...], end: Finished | None) -> str:
        """The text that these tokens complete, without what may yet turn out to begin a stop string."""
        free, token_ids = token_ids[: self._num_unstoppable], token_ids[self._num_unstoppable :]
        self._num_unstoppable -= len(free)
        return self._detokenizer.feed(free) + self._feed_stoppable(token_ids, end)

    def _feed_stoppable(self, token_ids: tuple[int, ...], end: Finished | None) -> str:
        if end is None:
            return self._matcher.feed(self._detokenizer.feed(token_ids))
        if end.stop_token_id is not None and not self._request.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # the stop token itself is not shown
        rest = self._detokenizer.feed(token_ids) + self._detokenizer.flush()
        return self._matcher.feed(rest) + self._matcher.flush()
