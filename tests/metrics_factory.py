"""Metrics over a pretend engine, and the reports that it would send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core import ModelInfo
from engine.errors import EngineError
from engine.messages import EngineStats, Event, Failed, Finished, RequestTimings, StepReport, StepStats
from engine.request import FinishReason
from server.metrics import Metrics
from tests.factories import make_info

IDLE = EngineStats(num_running=0, num_waiting=0, num_used_blocks=0, num_total_blocks=16, num_steps=0, last_step_s=None)


@dataclass
class PretendEngine:
    """What metrics see of an engine."""

    info: ModelInfo = field(default_factory=make_info)
    stats: EngineStats = IDLE


def make_step(events: Sequence[Event] = (), **fields: object) -> StepReport:
    defaults: dict[str, object] = {
        "num_prefill_tokens": 0,
        "num_decode_tokens": 0,
        "num_rows": 0,
        "num_sampled_tokens": 0,
        "num_preempted": 0,
        "num_prefix_queries": 0,
        "num_prefix_hits": 0,
        "schedule_s": 0.0,
        "forward_s": 0.0,
        "sample_s": 0.0,
        "update_s": 0.0,
        "ttft_s": (),
        "itl_s": (),
    }
    return StepReport(tuple(events), StepStats(**(defaults | fields)))  # type: ignore[arg-type]


def make_finished(reason: FinishReason = FinishReason.STOP, **fields: object) -> Finished:
    """A request that arrived at 10 s, ran from 11 s, had its first token at 13 s and its last, the fifth, at 17 s."""
    defaults: dict[str, object] = {
        "request_id": 0,
        "reason": reason,
        "stop_token_id": None,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 4,
        "num_output_tokens": 5,
        "max_tokens": 20,
        "timings": RequestTimings(10.0, 11.0, 13.0, 17.0, 17.5),
    }
    return Finished(**(defaults | fields))  # type: ignore[arg-type]


def make_busy_metrics(*, vllm_names: bool = True) -> Metrics:
    """Metrics in which everything has happened once, so that every series is there."""
    metrics = Metrics(PretendEngine(), vllm_names=vllm_names)
    events: list[Event] = [make_finished(), make_finished(FinishReason.ABORT), Failed(1, EngineError("a fault"))]
    metrics.on_report(make_step(events, num_prefill_tokens=7, num_rows=1, ttft_s=(0.2,), itl_s=(0.01,)))
    metrics.rejected("context_length_exceeded")
    metrics.responded("/v1/completions", 200)
    return metrics
