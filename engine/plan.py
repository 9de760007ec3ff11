"""What one step computes (StepPlan) and what came of it (StepResult).

Plain data between the scheduler and the model runner: neither side sees the other's objects. (`PlanRow.mask` is data
that is not there yet.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Prompt tokens whose logprobs are wanted of a row."""

    targets: range
    """Their positions: those after some of the row's own, so that the logits there say how likely they were."""
    num_top: int
    """How many of the most likely tokens are wanted beside each."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One request's share of a step: `token_ids` stand at positions `start ... start + len(token_ids) - 1`."""

    request_id: int
    token_ids: Sequence[int]
    """The tokens to compute; at least one."""
    start: int
    """Position of the first of them = how many of this request's tokens are in the KV cache already."""
    block_ids: Sequence[int]
    """The request's block table; covers every position up to the last of this row. Read it during the step only."""
    sampling: SamplingParams | None
    """How to choose the next token; None when this row ends before the request's last known token."""
    seed: int = 0
    """The request's resolved seed, 0 <= seed < 2**64."""
    context: Sequence[int] = ()
    """All known tokens of the request, prompt and output: the request's own list. Read it during the step only."""
    num_prompt_tokens: int = 0
    """How many of `context` are the prompt."""
    banned_token_ids: Collection[int] = ()
    """Tokens that may not be chosen in this step: those that would end the output before its `min_tokens`."""
    mask: Callable[[], bytes] | None = None
    """Works out which tokens may be chosen (`engine.request.Constraint.mask`); None: all. The sampler calls it once
    the forward pass is under way, so that on an accelerator the two overlap."""
    scoring: PromptScoring | None = None

    @property
    def end(self) -> int:
        """Position after the row's last token; a token sampled from this row gets this position."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All rows of one step, in the order in which they are packed."""

    rows: tuple[PlanRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token. Logprobs are finite: -9999.0 stands for minus infinity."""

    token_id: int
    logprob: float
    rank: int
    """1 + how many tokens were likelier."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their logprobs, as many as were asked for, the likeliest first."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The outcome of one row that was to be sampled."""

    request_id: int
    token_id: int
    """The new token; -1 when `error` is set."""
    error: str | None = None
    """Why this row alone failed (its logits were not finite, say)."""
    logprobs: TokenLogprobs | None = None
    """Set if the row's `sampling` asks for it and it did not fail."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """What one row with `scoring` gave."""

    request_id: int
    logprobs: tuple[TokenLogprobs, ...]
    """One for each of its targets; empty when `error` is set."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: a SampledRow for each plan row with `sampling`, a ScoredRow for each with `scoring`.

    Rows that failed or were postponed have neither.
    """

    sampled: tuple[SampledRow, ...]
    """In plan order."""
    scored: tuple[ScoredRow, ...] = ()
    """In plan order."""
    forward_s: float = 0.0
    """Seconds in the model's forward pass."""
    sample_s: float = 0.0
    """Seconds in the sampler."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Why rows could not be computed at all, by request id."""
    postponed: Collection[int] = frozenset()
    """Requests whose rows were not computed, since they read what a failed row was to write. Try them again."""


class PendingStep(Protocol):
    """A launched step."""

    def collect(self) -> StepResult:
        """Wait for the step and return what it gave."""


class Runner(Protocol):
    """Computes steps: the model (`engine.model.runner`), or a pure function in the tests."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. On an accelerator it returns before the step is done."""
