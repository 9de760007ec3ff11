"""RequestOutput: one request's engine events -> the Chunks its client sees. Detokenises and finds stop strings.

The same for `client` (streams) and `llm` (offline), so that both say the same of the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from engine.messages import Event, Failed, Finished, Submit, TokensOut
from engine.plan import TokenLogprobs
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
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids` if the request wants them, whether their text is shown, held back or cut off."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of the next tokens of the prompt if the request wants them. Joined: one for each but the first; all of
    them come before or with the first output token."""
    queue_s: float | None = None
    """Seconds from the request's arrival until it began to run."""
    first_scheduled_s: float | None = None
    """When that was (time.monotonic())."""
    hides_last_token: bool = False
    """The last of `token_ids` ended the output and is not shown: an end-of-text or stop token."""


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
        self._queue_s: float | None = None
        self._num_output_tokens = 0

    def take(self, events: Sequence[Event]) -> Chunk:
        """Take in the events of one request, in order, at least one; the last chunk has a `finish_reason`.

        A stop string in the text ends the output before the engine knows: the caller aborts the request then.
        Raises the error of a Failed.
        """
        news: list[TokensOut] = []
        end: Finished | None = None
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            self._num_cached_tokens = event.num_cached_tokens
            if isinstance(event, TokensOut):
                self._queue_s = event.queue_s
                news.append(event)
            else:
                end = event
        token_ids = tuple(chain.from_iterable(event.token_ids for event in news))
        text, num_used = self._feed(token_ids, end)
        is_last_used = num_used == len(token_ids)
        self._num_output_tokens += num_used
        finish_reason, stop_reason = self._ending(end)
        return Chunk(
            text=text,
            token_ids=token_ids[:num_used],
            usage=Usage(len(self._request.prompt_token_ids), self._num_cached_tokens, self._num_output_tokens),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=tuple(chain.from_iterable(event.logprobs for event in news))[:num_used],
            prompt_logprobs=tuple(chain.from_iterable(event.prompt_logprobs for event in news)),
            queue_s=self._queue_s,
            first_scheduled_s=None if self._queue_s is None else self._request.arrival_s + self._queue_s,
            hides_last_token=is_last_used and self._hides_last(end),
        )

    def _ending(self, end: Finished | None) -> tuple[FinishReason | None, str | int | None]:
        """Why it ends now, if it does."""
        if self._matcher.matched is not None:
            return FinishReason.STOP, self._matcher.matched
        if end is None:
            return None, None
        named = end.stop_token_id in self._request.params.stop_token_ids
        return end.reason, end.stop_token_id if named else None

    def _hides_last(self, end: Finished | None) -> bool:
        """Whether its last token ended it, and is not shown."""
        has_stop_token = end is not None and end.stop_token_id is not None
        return has_stop_token and not self._request.params.include_stop_str_in_output

    def _feed(self, token_ids: tuple[int, ...], end: Finished | None) -> tuple[str, int]:
        """The text that these tokens complete, without what may yet turn out to begin a stop string.

        And how many of them were needed: what comes behind a stop string is as if it had never been made, however many
        tokens a slow reader takes at once.
        """
        num_free = min(self._num_unstoppable, len(token_ids))
        self._num_unstoppable -= num_free
        texts = [self._detokenizer.feed(token_ids[:num_free])]
        num_shown = len(token_ids) - self._hides_last(end)
        for i in range(num_free, num_shown):
            texts.append(self._matcher.feed(self._detokenizer.feed(token_ids[i : i + 1])))
            if self._matcher.matched is not None:
                return "".join(texts), i + 1
        if end is not None:
            texts += (self._matcher.feed(self._detokenizer.flush()), self._matcher.flush())
        return "".join(texts), len(token_ids)
