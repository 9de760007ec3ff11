"""Traces of the real process: what a collector has got when it has ended, and what one that is away costs."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from server.tracing.export import CLOSE_S
from tests.e2e.process import free_port, running
from tests.factories_otlp import CLIENT, PARENT_ID, SERVER, TRACE_ID, UNSET, Received, collecting

pytestmark = pytest.mark.slow

BODY = {"prompt": "The capital of France is" * 10, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
END_TIMEOUT_S = 20.0


def test_the_last_spans_are_sent_at_the_end(tmp_path: Path) -> None:
    with collecting() as collector, running(tmp_path / "log", "--otlp-traces-endpoint", collector.url) as daemon:
        url = f"{daemon.url}/v1/completions"
        for _ in range(2):
            httpx.post(url, json=BODY, headers={"traceparent": CLIENT}, timeout=60).raise_for_status()
        with httpx.stream("POST", url, json=BODY | {"stream": True, "max_tokens": 1000}, timeout=60) as response:
            next(response.iter_lines())
        daemon.wait_idle()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(END_TIMEOUT_S) == 0, daemon.log
        assert f"trace {TRACE_ID}" in daemon.log
        assert "WARNING" not in daemon.log
        first, second, left = collector.spans
    assert {span.kind for span in collector.spans} == {SERVER}
    assert {span.status for span in collector.spans} == {UNSET}
    assert [span.parent_id for span in collector.spans] == [PARENT_ID, PARENT_ID, ""]
    assert (cached(first), cached(second)) == (0, 32)
    for span in (first, second):
        told = span.attributes
        assert (told["gen_ai.usage.output_tokens"], told["gen_ai.response.finish_reasons"]) == (8, ["length"])
        phases = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
        times = [told[f"gen_ai.latency.{phase}"] for phase in phases]
        assert min(times) > 0
        assert sum(times) < span.duration_s
    assert left.attributes["chairlift.aborted"] is True
    assert 0 < left.attributes["gen_ai.usage.output_tokens"] < 1000


def cached(span: Received) -> int:
    return int(span.attributes["gen_ai.usage.cache_read.input_tokens"])


def test_a_collector_that_is_away_holds_nobody_up(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1/traces"
    with running(tmp_path / "log", "--otlp-traces-endpoint", url) as daemon:
        for _ in range(3):
            httpx.post(f"{daemon.url}/v1/completions", json=BODY, timeout=60).raise_for_status()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(END_TIMEOUT_S) == 0, daemon.log
        warnings = [line for line in daemon.log.splitlines() if "WARNING" in line or "ERROR" in line]
        assert len(warnings) == 1
        assert f"the last traces could not be sent within {CLOSE_S:g} s" in warnings[0]
