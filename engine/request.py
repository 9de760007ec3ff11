"""Request: one prompt on its way through the engine. Owned by the engine thread."""

from __future__ import annotations

import enum
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.params import SamplingParams


class Constraint(Protocol):
    """What one request's output may still become. Engine thread only; `engine.grammar.matcher` has the real one."""

    def mask(self) -> bytes:
        """The tokens that may come next: bit i % 8 of byte i // 8 for token i, ceil(vocab_size / 8) bytes.

        All zero once `error` is set.
        """

    def accept(self, token_id: int) -> bool:
        """Take in the token that came next. False if that was not possible: `error` says why."""

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete, and nothing can follow."""

    @property
    def error(self) -> str | None:
        """Why the output can be guided no further (the grammar needs more work for a token than it may)."""


class Grammar(Protocol):
    """A compiled grammar, for any number of requests at once."""

    def start(self) -> Constraint:
        """The constraint of a request that has no output yet."""


class RequestStatus(enum.Enum):
    """Where a request is. How far it has come is in numbers (`num_computed_tokens`), not in states."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended. The values of STOP and LENGTH are those of the API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way through the engine.

    Each step gives it `min(num_tokens - num_computed_tokens, what is left of the budget)` tokens; when its last known
    token has been computed, the next one is sampled and becomes known. Prefill, chunked prefill, decode, prefix hits
    and recomputing after a preemption are all this one rule.
    """

    request_id: int
    token_ids: MutableSequence[int]
    """The prompt, then the output as it comes. An array in earnest: numpy reads it without looking at each token."""
    num_prompt_tokens: int
    params: SamplingParams
    max_tokens: int
    """`params.max_tokens`, resolved against the context length."""
    seed: int
    priority: int = 0
    """Smaller goes first, as in vLLM."""
    cache_salt: str = ""
    arrival_s: float = 0.0
    start_by_s: float | None = None
    """By when it must have been scheduled for the first time; None: whenever."""
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end it: the model's end-of-text tokens (unless ignored) and `params.stop_token_ids`."""

    constraint: Constraint | None = None
    """Holds the output to a grammar. Told of each token once, when it becomes known: recomputing asks it nothing."""

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of the full blocks of `token_ids`; grown on demand by the KV manager."""
    num_registered_blocks: int = 0
    """Leading blocks already findable by hash."""
    num_scored_tokens: int = field(init=False)
    """Leading prompt tokens whose logprobs have been asked of a step, or need not be: the first has none."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when first admitted."""
    num_preemptions: int = 0

    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def __post_init__(self) -> None:
        self.num_scored_tokens = self.num_prompt_tokens if self.params.prompt_logprobs is None else 1

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether one known token is left to compute: the next step that takes it gives a new one."""
        return len(self.token_ids) - self.num_computed_tokens == 1

    @property
    def is_complete(self) -> bool:
        """Whether it has `max_tokens`; if these are none, whether its prompt is computed."""
        return self.num_output_tokens >= self.max_tokens and (self.max_tokens > 0 or self.num_remaining_tokens == 0)

    @property
    def is_scored(self) -> bool:
        """Whether no more logprobs of its prompt are wanted."""
        return self.num_scored_tokens >= self.num_prompt_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens that need not be computed if the cache has them: the logits after the others are wanted."""
        return self.num_tokens - 1 if self.is_scored else self.num_scored_tokens - 1

    @property
    def may_end(self) -> bool:
        """Whether the next token may be one that ends it."""
        return self.num_output_tokens >= self.params.min_tokens

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: priority, then arrival, then id."""
        return (self.priority, self.arrival_s, self.request_id)
