"""The table of metrics in README.md, made from the metrics themselves."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core import ModelInfo
from engine.messages import EngineStats
from server.metrics.exporter import Metrics

_NOTHING = ModelInfo(
    name="",
    max_model_len=1,
    vocab_size=1,
    eos_token_ids=frozenset(),
    num_parameters=0,
    dtype="",
    device="",
    kernels="",
    block_size=1,
    num_blocks=1,
    kv_cache_dtype="",
)
_IDLE = EngineStats(num_running=0, num_waiting=0, num_used_blocks=0, num_total_blocks=1, num_steps=0, last_step_s=None)


@dataclass(frozen=True, slots=True)
class _Idle:
    """An engine that serves nothing."""

    info: ModelInfo = _NOTHING
    stats: EngineStats = _IDLE


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric, described."""

    name: str
    """As a query names it: a counter with its `_total`, a histogram without `_bucket`."""
    type: str
    labels: tuple[str, ...]
    """Without `model_name` and `engine`, which all have, and without a histogram's `le`."""
    doc: str


def describe_metrics() -> list[MetricRow]:
    """Every `chairlift_*` and `vllm:*` metric, in the order in which they are published."""
    metrics = Metrics(_Idle())
    metrics.responded("/", 200)  # so that every family has a sample to read the labels of
    rows = []
    for family in metrics.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = [label for label in family.samples[0].labels if label not in ("model_name", "engine", "le")]
        rows.append(MetricRow(name, family.type, tuple(labels), family.documentation))
    return rows
