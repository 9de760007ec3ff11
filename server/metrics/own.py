"""The `chairlift_*` metrics: names, types, meanings, and where each value comes from."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from engine.core import ModelInfo
from engine.messages import EngineStats
from server import __version__
from server.metrics import bounds
from server.metrics.families import Families
from server.metrics.tally import Tally


def chairlift_families(
    info: ModelInfo, tally: Tally, stats: EngineStats, now_s: float, start_s: float
) -> Iterator[Metric]:
    """All `chairlift_*` families now. `now_s`, `start_s` (when the server started): time.monotonic()."""
    make = Families({"model_name": info.name})
    yield from _requests(make, tally, stats)
    yield from _latencies(make, tally)
    yield from _tokens(make, tally, info)
    yield from _cache(make, tally, stats, info)
    yield from _steps(make, tally, stats, now_s, start_s)
    yield from _server(make, tally, info)


def _requests(make: Families, tally: Tally, stats: EngineStats) -> Iterator[Metric]:
    yield make.gauge("chairlift_requests_running", "Requests that run now.", stats.num_running)
    yield make.gauge("chairlift_requests_waiting", "Requests that wait for a place now.", stats.num_waiting)
    yield make.counters(
        "chairlift_requests_finished",
        "Requests that ended: `stop`, `length`, `abort` (the client left, a deadline, a shutdown) or `error`.",
        ("reason",),
        {(reason,): count for reason, count in tally.finished.items()},
    )
    yield make.counters(
        "chairlift_requests_rejected",
        "Requests refused before they reached the engine, by error code.",
        ("reason",),
        {(reason,): count for reason, count in tally.rejected.items()},
    )
    yield make.counters(
        "chairlift_requests_rate_limited",
        "Requests refused by their key's rate limit: of `requests` or `tokens`, or `too_large` for it at any time.",
        ("limit",),
        {(limit,): count for limit, count in tally.rate_limited.items()},
    )


def _latencies(make: Families, tally: Tally) -> Iterator[Metric]:
    yield make.histogram(
        "chairlift_time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        tally.ttft_s,
        bounds.REQUEST_SECONDS,
    )
    yield make.histogram(
        "chairlift_inter_token_latency_seconds",
        "From one token of a request to its next.",
        tally.itl_s,
        bounds.TOKEN_SECONDS,
    )
    parts = (
        ("chairlift_request_seconds", "From arrival to end", tally.e2e_s),
        ("chairlift_request_queue_seconds", "From arrival to the first step", tally.queue_s),
        ("chairlift_request_prefill_seconds", "From the first step to the first token", tally.prefill_s),
        ("chairlift_request_decode_seconds", "From the first token to the last", tally.decode_s),
    )
    for name, doc, observed in parts:
        yield make.histogram(
            name, f"{doc}, of requests that ended by `stop` or `length`.", observed, bounds.REQUEST_SECONDS
        )


def _tokens(make: Families, tally: Tally, info: ModelInfo) -> Iterator[Metric]:
    yield make.counter(
        "chairlift_prompt_tokens",
        "Prompt tokens of the requests that began to run, cached ones too.",
        tally.num_prompt_tokens,
    )
    yield make.counter(
        "chairlift_cached_prompt_tokens",
        "Prompt tokens that were in the prefix cache.",
        tally.num_cached_tokens,
    )
    yield make.counter("chairlift_generated_tokens", "Tokens generated.", tally.num_generated_tokens)
    yield make.counters(
        "chairlift_computed_tokens",
        "Tokens that went through the model: `prefill` (prompts, and recomputing after a preemption) or `decode`.",
        ("kind",),
        {("prefill",): tally.num_prefill_tokens, ("decode",): tally.num_decode_tokens},
    )
    lengths = bounds.request_tokens(info.max_model_len)
    yield make.histogram(
        "chairlift_request_prompt_tokens",
        "Prompt tokens of each request that ended by `stop` or `length`.",
        tally.prompt_lengths,
        lengths,
    )
    yield make.histogram(
        "chairlift_request_generated_tokens",
        "Tokens generated for each request that ended by `stop` or `length`.",
        tally.output_lengths,
        lengths,
    )


def _cache(make: Families, tally: Tally, stats: EngineStats, info: ModelInfo) -> Iterator[Metric]:
    yield make.gauge(
        "chairlift_kv_cache_usage_ratio",
        "Share of the KV cache that requests hold now, 0 to 1. Cached prompts that nobody uses count as free.",
        kv_usage(stats),
    )
    yield make.gauge("chairlift_kv_cache_tokens", "Size of the KV cache, in tokens.", info.kv_cache_tokens)
    yield make.counter(
        "chairlift_preemptions",
        "Running requests put back into the queue because the KV cache was full.",
        tally.num_preemptions,
    )


def _steps(make: Families, tally: Tally, stats: EngineStats, now_s: float, start_s: float) -> Iterator[Metric]:
    yield make.histogram("chairlift_step_tokens", "Tokens in one step.", tally.step_tokens, bounds.STEP_TOKENS)
    yield make.histogram("chairlift_step_rows", "Requests in one step.", tally.step_rows, bounds.STEP_ROWS)
    yield make.histograms(
        "chairlift_step_phase_seconds",
        "Time of a step's phases: `schedule`, `forward`, `sample`, `update`.",
        ("phase",),
        {(phase,): observed for phase, observed in tally.phase_s.items()},
        bounds.PHASE_SECONDS,
    )
    yield make.gauge(
        "chairlift_last_step_age_seconds",
        "Time since the last step ended (before the first one: since start). It grows while idle.",
        now_s - (start_s if stats.last_step_s is None else stats.last_step_s),
    )
    yield make.gauge(
        "chairlift_step_in_progress_seconds",
        "How long the step that runs now has been running; 0 between steps.",
        0.0 if stats.step_started_s is None else now_s - stats.step_started_s,
    )


def _server(make: Families, tally: Tally, info: ModelInfo) -> Iterator[Metric]:
    yield make.counters(
        "chairlift_http_responses",
        "HTTP responses by route and status. A stream that fails after its start counts as 200.",
        ("route", "status"),
        tally.responses,
    )
    yield make.histogram(
        "chairlift_event_loop_lag_seconds",
        "By how much a timer on the event loop came late: what every stream waits for, too.",
        tally.event_loop_lag_s,
        bounds.LAG_SECONDS,
    )
    yield make.gauge(
        "chairlift_build_info",
        "What runs here, in labels; the value is 1.",
        1,
        version=__version__,
        dtype=info.dtype,
        device=info.device,
        kernels=info.kernels,
        max_model_len=str(info.max_model_len),
    )


def kv_usage(stats: EngineStats) -> float:
    """Share of the KV cache that requests hold, 0 to 1."""
    return stats.num_used_blocks / stats.num_total_blocks if stats.num_total_blocks else 0.0
