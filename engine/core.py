"""EngineCore: one step = schedule -> launch -> collect -> update.

Plain synchronous code: no threads, no text, no HTTP. `loop` drives it in a thread, `llm` in its caller's.
"""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import EngineError, Overloaded, RequestError, is_fault
from engine.messages import (
    Abort,
    EngineStats,
    Event,
    Failed,
    Finished,
    RequestTimings,
    StepReport,
    StepStats,
    Submit,
    TokensOut,
)
from engine.params import MAX_LOGIT_BIAS, SamplingParams
from engine.plan import Runner
from engine.request import FinishReason, Request
from engine.scheduler import Outcome, Scheduler

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60.0
"""Most seconds after which a request that has waited too long is asked to come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is served, and how large requests may be."""

    name: str
    """What clients call it."""
    max_model_len: int
    """Longest prompt plus output, in tokens; never more than the KV cache holds."""
    vocab_size: int
    """Token ids are 0 ... vocab_size - 1."""
    eos_token_ids: frozenset[int]
    num_parameters: int
    dtype: str
    device: str
    kernels: str
    block_size: int
    num_blocks: int
    kv_cache_dtype: str
    sampling_defaults: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Fields of SamplingParams that the model itself has defaults for: see `model.sampling_defaults`."""

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size


def check_fit(info: ModelInfo, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
    """Refuse a request that could never run, by name and number. Called before it is queued, in the client's thread.

    Raises RequestError.
    """
    length, limit = len(prompt_token_ids), info.max_model_len
    if length == 0:
        raise RequestError("the prompt is empty: it needs at least one token", param="prompt", code="invalid_value")
    if length + (params.max_tokens != 0) > limit:
        raise RequestError(
            f"the prompt has {length} tokens; the context length is {limit}, of which the output needs at least one",
            param="prompt",
            code="context_length_exceeded",
        )
    if params.max_tokens is not None and length + params.max_tokens > limit:
        raise RequestError(
            f"the prompt has {length} tokens and max_tokens is {params.max_tokens}, together "
            f"{length + params.max_tokens}; the context length is {limit}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if length + params.min_tokens > limit:
        raise RequestError(
            f"the prompt has {length} tokens and min_tokens is {params.min_tokens}; the context length is {limit}",
            param="min_tokens",
            code="context_length_exceeded",
        )
    _check_ids("prompt", prompt_token_ids, info.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
    _check_ids("logit_bias", params.logit_bias, info.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), info.vocab_size)
    _check_choice(info, params)


def _check_choice(info: ModelInfo, params: SamplingParams) -> None:
    """Refuse a request whose bans leave no token to choose."""
    banned = {token_id for token_id, bias in params.logit_bias.items() if bias <= -MAX_LOGIT_BIAS}
    if params.min_tokens > 0:
        banned |= end_token_ids(info, params)
    candidates = range(info.vocab_size) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    if len(banned) >= len(candidates) and banned.issuperset(candidates):
        raise RequestError(
            "logit_bias, allowed_token_ids and min_tokens together leave no token that may be chosen",
            param="logit_bias" if params.allowed_token_ids is None else "allowed_token_ids",
            code="invalid_value",
        )


def end_token_ids(info: ModelInfo, params: SamplingParams) -> frozenset[int]:
    """The tokens that end a request's output."""
    ignore_eos = params.ignore_eos and params.grammar is None
    return (frozenset() if ignore_eos else info.eos_token_ids) | frozenset(params.stop_token_ids)


def _check_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{param} has token id {wrong}; this model's ids are 0 to {vocab_size - 1}",
            param=param,
            code="invalid_value",
        )


class EngineCore:
    """The engine without its thread. `step()` while `has_work`; `submit` and `abort` between steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: ModelInfo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self.runner = runner
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._events: list[Event] = []  # for the next report
        self._num_steps = 0
        self._last_step_s: float | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return self.scheduler.has_work

    def now_s(self) -> float:
        """The clock that all times in reports are read from."""
        return self._clock()

    def submit(self, message: Submit) -> None:
        """Queue a request. One that does not fit, or cannot begin, fails in the next report (`check_fit` is the
        client's first)."""
        try:
            check_fit(self.info, message.prompt_token_ids, message.params)
            request = self._make_request(message)
        except RequestError as error:
            self._events.append(Failed(message.request_id, error))
            return
        except BaseException as error:
            if not is_fault(error):
                raise
            logger.exception("request %d cannot begin", message.request_id)
            failed = EngineError("this request could not be begun; the server's log says more")
            self._events.append(Failed(message.request_id, failed))
            return
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, message: Abort) -> None:
        """End a request now and free its blocks. Ids that are not open are ignored."""
        request = self._requests.get(message.request_id)
        if request is not None:
            self.scheduler.finish(request)
            self._end(request, message.reason)

    def drop_overdue(self) -> None:
        """Fail the requests that were to begin by now, before anything is computed for them."""
        now_s = self._clock()
        for request in self.scheduler.overdue(now_s):
            waited_s = now_s - request.arrival_s
            self.scheduler.finish(request)
            del self._requests[request.request_id]
            # As long again: about what the queue takes.
            error = Overloaded(
                f"the request has waited {waited_s:.1f} s and not begun: that is as long as one may wait here",
                retry_after_s=min(waited_s, MAX_RETRY_AFTER_S),
            )
            self._events.append(Failed(request.request_id, error))

    def step(self) -> StepReport:
        """Compute one step and report every request's events, those of aborts before it included."""
        started = self._clock()
        step = self.scheduler.schedule(started)
        scheduled = self._clock()
        result = self.runner.launch(step.plan).collect()
        collected = self._clock()
        outcomes = self.scheduler.update(step, result)
        ttft_s, itl_s = self._record(outcomes, collected)
        self._num_steps += 1
        self._last_step_s = self._clock()
        stats = StepStats(
            num_prefill_tokens=step.num_prefill_tokens,
            num_decode_tokens=step.num_decode_tokens,
            num_rows=len(step.rows),
            num_sampled_tokens=len(ttft_s) + len(itl_s),
            num_preempted=step.num_preempted,
            num_prefix_queries=step.num_prefix_queries,
            num_prefix_hits=step.num_prefix_hits,
            schedule_s=scheduled - started,
            forward_s=result.forward_s,
            sample_s=result.sample_s,
            update_s=self._last_step_s - collected,
            ttft_s=tuple(ttft_s),
            itl_s=tuple(itl_s),
        )
        return StepReport(self._take_events(), stats)

    def flush(self) -> StepReport:
        """Report what happened without a step: aborts while nothing runs."""
        return StepReport(self._take_events())

    def stats(self) -> EngineStats:
        """The state now."""
        pool = self.scheduler.kv.pool
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_used_blocks=pool.num_used,
            num_total_blocks=pool.num_blocks,
            num_steps=self._num_steps,
            last_step_s=self._last_step_s,
        )

    def check_integrity(self) -> None:
        """Prove that blocks and requests agree (AssertionError otherwise). For tests."""
        self.scheduler.kv.check_integrity(self._requests.values())
        queued = self.scheduler.running + self.scheduler.waiting
        assert {r.request_id for r in queued} == set(self._requests), "a request is lost"

    def _make_request(self, message: Submit) -> Request:
        params = message.params
        room = self.info.max_model_len - len(message.prompt_token_ids)
        return Request(
            request_id=message.request_id,
            token_ids=array("q", message.prompt_token_ids),
            num_prompt_tokens=len(message.prompt_token_ids),
            params=params,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            priority=message.priority,
            cache_salt=message.cache_salt,
            arrival_s=message.arrival_s,
            start_by_s=message.deadlines.start_s,
            eos_token_ids=end_token_ids(self.info, params),
            constraint=None if message.grammar is None else message.grammar.start(),
        )

    def _record(self, outcomes: Sequence[Outcome], now_s: float) -> tuple[list[float], list[float]]:
        """Turn outcomes into events; returns times to first token and inter-token gaps, in seconds."""
        ttft_s: list[float] = []
        itl_s: list[float] = []
        for outcome in outcomes:
            request = outcome.request
            if outcome.error is not None:
                del self._requests[request.request_id]
                self._events.append(Failed(request.request_id, outcome.error))
                continue
            if outcome.token_id is not None:
                if request.last_token_s is None:
                    request.first_token_s = now_s
                    ttft_s.append(now_s - request.arrival_s)
                else:
                    itl_s.append(now_s - request.last_token_s)
                request.last_token_s = now_s
            self._events.append(_tokens_out(outcome))
            if outcome.finish_reason is not None:
                stop_token_id = outcome.token_id if outcome.token_id in request.eos_token_ids else None
                self._end(request, outcome.finish_reason, stop_token_id)
        return ttft_s, itl_s

    def _end(self, request: Request, reason: FinishReason, stop_token_id: int | None = None) -> None:
        del self._requests[request.request_id]
        timings = RequestTimings(
            arrival_s=request.arrival_s,
            first_scheduled_s=request.first_scheduled_s,
            first_token_s=request.first_token_s,
            last_token_s=request.last_token_s,
            finished_s=self._clock(),
        )
        self._events.append(
            Finished(
                request_id=request.request_id,
                reason=reason,
                stop_token_id=stop_token_id,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens or 0,
                num_output_tokens=request.num_output_tokens,
                max_tokens=request.max_tokens,
                timings=timings,
            )
        )

    def _take_events(self) -> tuple[Event, ...]:
        events, self._events = tuple(self._events), []
        return events


def _tokens_out(outcome: Outcome) -> TokensOut:
    request = outcome.request
    return TokensOut(
        request_id=request.request_id,
        token_ids=() if outcome.token_id is None else (outcome.token_id,),
        num_cached_tokens=request.num_cached_tokens or 0,
        queue_s=None if request.first_scheduled_s is None else request.first_scheduled_s - request.arrival_s,
        logprobs=() if outcome.logprobs is None else (outcome.logprobs,),
        prompt_logprobs=outcome.prompt_logprobs,
    )
