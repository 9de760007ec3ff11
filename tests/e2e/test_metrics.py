"""A live scrape has what dashboards, rules and vLLM's tools ask for, and its gauges come to rest by themselves."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.process import Daemon
from tests.metric_names import expressions_in, missing_from, names_in

CONFIG = Path(__file__).parents[2] / "config"

QUERIES = sorted(
    expr
    for path in (*(CONFIG / "grafana" / "dashboards").glob("*.json"), *(CONFIG / "prometheus").glob("rules*.yml"))
    for expr in expressions_in(path)
)

VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:iteration_tokens_total",
    "vllm:cache_config_info",
}


def complete(daemon: Daemon, *, max_tokens: int) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60.0).raise_for_status()


@pytest.fixture(scope="module")
def scrape(daemon: Daemon) -> bytes:
    """Taken after some use, as labels come with what they label."""
    complete(daemon, max_tokens=4)
    httpx.post(f"{daemon.url}/v1/completions", json={"prompt": ""}, timeout=60.0)
    return daemon.scrape()


def test_there_are_queries_to_test() -> None:
    assert len(QUERIES) > 20


@pytest.mark.parametrize("expr", QUERIES)
def test_queries_find_what_they_ask_for(expr: str, scrape: bytes) -> None:
    assert missing_from(scrape, expr) == []


def test_the_names_that_tools_for_vllm_read_are_there(scrape: bytes) -> None:
    assert names_in(scrape) >= VLLM_NAMES


def test_counters_count_and_gauges_come_to_rest(daemon: Daemon) -> None:
    daemon.wait_idle()
    counters = ("chairlift_generated_tokens_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_total")
    before = {name: daemon.gauge(name) for name in counters}
    complete(daemon, max_tokens=5)
    daemon.wait_idle()
    grown = [daemon.gauge(name) - before[name] for name in counters]
    assert grown == [5, 5, 4]
    assert daemon.gauge("vllm:num_requests_running") == 0
    assert daemon.gauge("vllm:num_requests_waiting") == 0
    assert daemon.gauge("vllm:kv_cache_usage_perc") == 0
    assert daemon.gauge("chairlift_step_in_progress_seconds") == 0
