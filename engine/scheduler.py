"""The scheduler: which tokens of which requests the next step computes.

There are no prefill and decode phases. Every request has tokens that are known (`num_tokens`) and tokens that are
computed (`num_computed_tokens`); a step gives it `min(known - computed, what is left of the budget)` of them. A step's
budget of `max_num_batched_tokens` is filled in this order:

    1. running requests that decode, one token each        so no stream ever waits for somebody's long prompt,
    2. running requests still in their prompt              and decodes ride along with prefill for nearly nothing
    3. waiting requests, by priority, then arrival         admitted when the blocks for *all* their tokens are there

When a decode needs a block and none is free, the lowest-priority, newest running request is preempted: its blocks go
back and it waits at the head of its priority, to be recomputed later (mostly from its own cached prefix).

A prompt whose logprobs are wanted is computed whole, without the prefix cache, and its chunks are no longer than
MAX_SCORED_TOKENS; each of its tokens is scored once, also if it is preempted on the way.

Knows requests and blocks. It does not know the model, tensors, text, threads or HTTP. Engine thread only.
"""

from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass, field

from config.schema import SchedulerConfig
from engine.errors import EngineError, RequestError, is_fault
from engine.kv.manager import KVCacheManager
from engine.plan import PlanRow, PromptScoring, SampledRow, ScoredRow, StepPlan, StepResult, TokenLogprobs
from engine.request import FinishReason, Request, RequestStatus

logger = logging.getLogger(__name__)

MAX_SCORED_TOKENS = 512
"""Prompt tokens that a step scores: the logits of all of them are there at once, a megabyte for some five."""


@dataclass(slots=True)
class ScheduledStep:
    """A step as the scheduler sees it: the plan for the runner, the requests behind its rows, and some counts."""

    rows: list[PlanRow] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """The request of each row."""
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_scored_tokens: int = 0
    """Prompt tokens whose logprobs are wanted."""
    num_preempted: int = 0
    num_prefix_queries: int = 0
    """Prompt tokens of the requests admitted for the first time."""
    num_prefix_hits: int = 0
    """... of which the prefix cache had this many."""

    @property
    def plan(self) -> StepPlan:
        """What the runner is to compute."""
        return StepPlan(tuple(self.rows))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave one request: a new token, logprobs of its prompt, its end; at least one of them."""

    request: Request
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    """Those of the new token, if they are wanted."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    """Why the request failed; nothing else means anything then."""


class Scheduler:
    """Waiting and running requests, and the token budget."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.running: list[Request] = []  # sorted by Request.order
        self.waiting: list[Request] = []  # sorted by Request.order

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        bisect.insort(self.waiting, request, key=_order)

    def finish(self, request: Request) -> None:
        """End a request, wherever it is, and give its blocks back."""
        _remove(self.running if request.status is RequestStatus.RUNNING else self.waiting, request)
        self.kv.free(request)
        request.status = RequestStatus.FINISHED

    def overdue(self, now_s: float) -> list[Request]:
        """Waiting requests that were to begin by now and have not. One that a preemption has put back has begun."""
        return [
            request
            for request in self.waiting
            if request.start_by_s is not None and request.start_by_s <= now_s and request.first_scheduled_s is None
        ]

    def schedule(self, now_s: float) -> ScheduledStep:
        """Fill the next step. `now_s` (time.monotonic()) becomes `first_scheduled_s` of newcomers.

        The step has at least one row whenever there is work: a lone request always fits the cache, since longer ones
        are refused at the door (`engine.core.check_fit`).
        """
        step = ScheduledStep()
        budget = self.config.max_num_batched_tokens
        budget -= self._schedule_decodes(step, budget)
        budget -= self._schedule_prefills(step, budget)
        self._admit_waiting(step, budget, now_s)
        return step

    def update(self, step: ScheduledStep, result: StepResult) -> list[Outcome]:
        """Take in a step's results, in plan order. Requests that end are finished here; the others go on."""
        next_sampled, next_scored = iter(result.sampled), iter(result.scored)
        outcomes = []
        for row, request in zip(step.rows, step.requests, strict=True):
            if (reason := result.failed.get(request.request_id)) is not None:
                outcomes.append(self._fail(request, EngineError(reason)))
                continue
            if request.request_id in result.postponed:
                self._postpone(row, request)
                continue
            scores = None if row.scoring is None else next(next_scored)
            token = None if row.sampling is None else next(next_sampled)
            if scores is not None or token is not None or request.is_complete:
                outcomes.append(self._take_in(request, token, scores))
        return outcomes

    def _schedule_decodes(self, step: ScheduledStep, budget: int) -> int:
        num_tokens = 0
        for request in [r for r in self.running if r.is_decoding][:budget]:
            if request.status is not RequestStatus.RUNNING:
                break  # preempted just now for one before it, and so were all behind it
            if not self._make_room(step, request):
                break
            self._add_row(step, request, 1)
            step.num_decode_tokens += 1
            num_tokens += 1
        return num_tokens

    def _make_room(self, step: ScheduledStep, request: Request) -> bool:
        """Have a block for the request's next position, preempting from the back; False if it had to go itself.

        Decodes are scheduled from the front, so whoever is preempted is not in the step yet.
        """
        while not self.kv.extend(request, request.num_tokens):
            victim = self.running[-1]
            self._put_back(victim)
            step.num_preempted += 1
            if victim is request:
                return False
        return True

    def _postpone(self, row: PlanRow, request: Request) -> None:
        """Undo what scheduling this row noted: it has not been computed, and what it shares neither."""
        if row.scoring is not None:
            request.num_scored_tokens = row.scoring.targets.start
        self.kv.forget(request)
        self._put_back(request)

    def _put_back(self, request: Request) -> None:
        """Let a running request wait again, to be computed anew."""
        _remove(self.running, request)
        self.kv.free(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.add(request)

    def _schedule_prefills(self, step: ScheduledStep, budget: int) -> int:
        num_tokens = 0
        for request in self.running:
            count = min(request.num_remaining_tokens, self._limit(step, request, budget - num_tokens))
            if count > 0:  # 0: it decodes in this step already, or the budget is spent
                self._add_row(step, request, count)
                num_tokens += count
        step.num_prefill_tokens += num_tokens
        return num_tokens

    def _admit_waiting(self, step: ScheduledStep, budget: int, now_s: float) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            if step.num_preempted:
                return  # blocks are short: whoever was put out would only push in again
            request = self.waiting[0]
            limit = self._limit(step, request, budget)
            if limit <= 0 or not self.kv.admit(request, others_running=bool(self.running)):
                return
            count = request.num_remaining_tokens
            if self.config.enable_chunked_prefill:
                count = min(count, limit)
            elif count > budget and step.num_prefill_tokens > 0:
                self.kv.free(request)
                return  # it goes whole: in the next step, over the budget if it must
            self._start(step, request, now_s)
            self._add_row(step, request, count)
            step.num_prefill_tokens += count
            budget -= count

    def _limit(self, step: ScheduledStep, request: Request, budget: int) -> int:
        """Most tokens that the request may get in this step, of what is left of the budget."""
        return budget if request.is_scored else min(budget, MAX_SCORED_TOKENS - step.num_scored_tokens)

    def _start(self, step: ScheduledStep, request: Request, now_s: float) -> None:
        del self.waiting[0]
        bisect.insort(self.running, request, key=_order)
        request.status = RequestStatus.RUNNING
        if request.num_cached_tokens is None:  # not when it comes back from a preemption
            request.num_cached_tokens = request.num_computed_tokens
            request.first_scheduled_s = now_s
            step.num_prefix_queries += request.num_prompt_tokens
            step.num_prefix_hits += request.num_cached_tokens

    def _add_row(self, step: ScheduledStep, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        end = start + count
        sampling = request.params if end == request.num_tokens and request.max_tokens > 0 else None
        row = PlanRow(
            request_id=request.request_id,
            token_ids=request.token_ids[start:end],
            start=start,
            block_ids=request.block_ids,
            sampling=sampling,
            seed=request.seed,
            context=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            banned_token_ids=() if request.may_end else request.eos_token_ids,
            mask=None if request.constraint is None or sampling is None else request.constraint.mask,
            scoring=_scoring(request, end),
        )
        if row.scoring is not None:
            step.num_scored_tokens += len(row.scoring.targets)
            request.num_scored_tokens = row.scoring.targets.stop
        step.rows.append(row)
        step.requests.append(request)
        request.num_computed_tokens = end
        self.kv.register(request)

    def _take_in(self, request: Request, token: SampledRow | None, scores: ScoredRow | None) -> Outcome:
        if (error := _error_of(request, token, scores)) is not None:
            return self._fail(request, error)
        if token is not None:
            request.token_ids.append(token.token_id)
        reason = None
        if token is not None and _is_last(request, token.token_id):
            reason = FinishReason.STOP
        elif request.is_complete:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish(request)
        return Outcome(
            request,
            token_id=None if token is None else token.token_id,
            logprobs=None if token is None else token.logprobs,
            prompt_logprobs=() if scores is None else scores.logprobs,
            finish_reason=reason,
        )

    def _fail(self, request: Request, error: EngineError) -> Outcome:
        self.kv.forget(request)
        self.finish(request)
        return Outcome(request, error=error)


def _scoring(request: Request, end: int) -> PromptScoring | None:
    """What a row that ends before position `end` is to score: it computes the logits for the tokens up to there."""
    count = request.params.prompt_logprobs
    targets = range(request.num_scored_tokens, min(end + 1, request.num_prompt_tokens))
    return PromptScoring(targets, count) if targets and count is not None else None


def _error_of(request: Request, token: SampledRow | None, scores: ScoredRow | None) -> EngineError | None:
    """What the request fails of in this step, if it does. Its constraint is told of the new token."""
    if scores is not None and scores.error is not None:
        return EngineError(scores.error)
    return None if token is None else _guide(request, token)


def _is_last(request: Request, token_id: int) -> bool:
    return token_id in request.eos_token_ids or (request.constraint is not None and request.constraint.is_finished)


def _guide(request: Request, result: SampledRow) -> EngineError | None:
    """Tell the request's constraint of its new token. Returns what the request fails of, if it does."""
    constraint, grammar = request.constraint, request.params.grammar
    if constraint is None or grammar is None:
        return None if result.error is None else EngineError(result.error)
    if result.error is None:
        try:
            constraint.accept(result.token_id)
        except BaseException as fault:
            if not is_fault(fault):
                raise
            logger.exception("the grammar of request %d failed", request.request_id)
            return EngineError(f"{grammar.param} can guide the output no further; the server's log says more")
    error = constraint.error
    if error is None and result.error is not None:
        error = "no token is left that may come next, beside logit_bias, allowed_token_ids and min_tokens"
    if error is None:
        return None
    return RequestError(
        f"{grammar.param} can guide the output no further: {error}", param=grammar.param, code="invalid_value"
    )


def _order(request: Request) -> tuple[int, float, int]:
    return request.order


def _remove(queue: list[Request], request: Request) -> None:
    index = bisect.bisect_left(queue, request.order, key=_order)
    assert queue[index] is request
    del queue[index]
