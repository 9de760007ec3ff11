"""Tally: what has been counted since the server started. It knows nothing of metric names or of Prometheus."""

from __future__ import annotations

from collections import Counter

from engine.messages import Failed, Finished, StepReport, StepStats
from engine.request import FinishReason
from server.metrics import bounds
from server.metrics.distribution import Distribution

PHASES = ("schedule", "forward", "sample", "update")
ERROR = "error"
"""How a request ends that failed; the other ends are those of FinishReason."""

REJECTIONS = (
    *("context_length_exceeded", "deadline_exceeded", "headers_too_large", "host_not_allowed"),
    *("invalid_api_key", "invalid_http", "invalid_json", "invalid_value"),
    *("model_not_found", "origin_not_allowed", "overloaded", "rate_limit_exceeded", "request_timeout"),
    *("previous_response_not_found", "response_not_found", "stopping"),
    *("request_too_large", "unavailable", "unsupported_parameter", "url_too_long"),
)
"""Error codes that are published from the start: a series that appears with its first count shows no rise."""

_SERVED = (FinishReason.STOP, FinishReason.LENGTH)


class Tally:
    """Counts and distributions since start. Grows once per step; the event loop's thread only."""

    def __init__(self, max_model_len: int) -> None:
        self.num_prompt_tokens = 0
        """Of requests that began to run, counted when they do."""
        self.num_cached_tokens = 0
        """... of which were in the prefix cache."""
        self.num_generated_tokens = 0
        self.num_prefill_tokens = 0
        """Computed in prompts; recomputing after a preemption counts again."""
        self.num_decode_tokens = 0
        self.num_preemptions = 0

        self.finished = Counter({reason.value: 0 for reason in FinishReason} | {ERROR: 0})
        self.rejected = Counter(dict.fromkeys(REJECTIONS, 0))
        self.rate_limited = Counter(dict.fromkeys(("requests", "tokens", "too_large"), 0))
        self.responses: Counter[tuple[str, ...]] = Counter()
        """By route and HTTP status."""

        self.ttft_s = Distribution(bounds.REQUEST_SECONDS, bounds.VLLM_FIRST_TOKEN_SECONDS)
        self.itl_s = Distribution(bounds.TOKEN_SECONDS, bounds.VLLM_TOKEN_SECONDS)
        self.step_tokens = Distribution(bounds.STEP_TOKENS, bounds.VLLM_STEP_TOKENS)
        self.step_rows = Distribution(bounds.STEP_ROWS)
        self.phase_s = {phase: Distribution(bounds.PHASE_SECONDS) for phase in PHASES}
        self.event_loop_lag_s = Distribution(bounds.LAG_SECONDS)

        # Of each request that was served to its end.
        self.e2e_s = _request_seconds()
        self.queue_s = _request_seconds()
        self.prefill_s = _request_seconds()
        self.decode_s = _request_seconds()
        self.inference_s = _request_seconds()
        self.tpot_s = Distribution(bounds.TOKEN_SECONDS, bounds.VLLM_TOKEN_SECONDS)
        token_bounds = bounds.request_tokens(max_model_len)
        self.prompt_lengths = Distribution(token_bounds)
        self.output_lengths = Distribution(token_bounds)
        self.max_tokens = Distribution(token_bounds)

    def add(self, report: StepReport) -> None:
        """Count one step and the ends of requests that came with it."""
        if report.stats is not None:
            self._add_step(report.stats)
        for event in report.events:
            if isinstance(event, Finished):
                self._add_finished(event)
            elif isinstance(event, Failed):
                self.finished[ERROR] += 1

    def _add_step(self, stats: StepStats) -> None:
        self.num_prompt_tokens += stats.num_prefix_queries
        self.num_cached_tokens += stats.num_prefix_hits
        self.num_generated_tokens += stats.num_sampled_tokens
        self.num_prefill_tokens += stats.num_prefill_tokens
        self.num_decode_tokens += stats.num_decode_tokens
        self.num_preemptions += stats.num_preempted
        self.ttft_s.observe(stats.ttft_s)
        self.itl_s.observe(stats.itl_s)
        self.step_tokens.observe((stats.num_prefill_tokens + stats.num_decode_tokens,))
        self.step_rows.observe((stats.num_rows,))
        seconds = (stats.schedule_s, stats.forward_s, stats.sample_s, stats.update_s)
        for phase, duration in zip(PHASES, seconds, strict=True):
            self.phase_s[phase].observe((duration,))

    def _add_finished(self, event: Finished) -> None:
        self.finished[event.reason.value] += 1
        if event.reason not in _SERVED:
            return  # how long an aborted request took tells when its client left, not how fast the server is
        self.prompt_lengths.observe((event.num_prompt_tokens,))
        self.output_lengths.observe((event.num_output_tokens,))
        self.max_tokens.observe((event.max_tokens,))
        times = event.timings
        _observe_span(self.e2e_s, times.arrival_s, times.finished_s)
        _observe_span(self.queue_s, times.arrival_s, times.first_scheduled_s)
        _observe_span(self.prefill_s, times.first_scheduled_s, times.first_token_s)
        _observe_span(self.decode_s, times.first_token_s, times.last_token_s)
        _observe_span(self.inference_s, times.first_scheduled_s, times.last_token_s)
        if event.num_output_tokens > 1 and times.first_token_s is not None and times.last_token_s is not None:
            self.tpot_s.observe(((times.last_token_s - times.first_token_s) / (event.num_output_tokens - 1),))


def _observe_span(distribution: Distribution, start_s: float | None, end_s: float | None) -> None:
    if start_s is not None and end_s is not None:
        distribution.observe((end_s - start_s,))


def _request_seconds() -> Distribution:
    return Distribution(bounds.REQUEST_SECONDS, bounds.VLLM_REQUEST_SECONDS)
