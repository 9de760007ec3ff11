"""Metrics for Prometheus: `chairlift_*`, and `vllm:*` for what was made for vLLM.

    StepReport --> Metrics.on_report --> Tally (counts, distributions)  --+
    engine.stats (a reference to the engine's last state) ----------------+--> own.py, vllm.py --> GET /metrics
    rejected(), responded(), watch_event_loop() --> Tally ----------------+

A step costs a few additions, whatever is published: the families are made when scraped (`own`, `vllm`).
"""

from server.metrics.describe import MetricRow, describe_metrics
from server.metrics.exporter import EngineView, Metrics
from server.metrics.http import CountResponses, router

__all__ = ["CountResponses", "EngineView", "MetricRow", "Metrics", "describe_metrics", "router"]
