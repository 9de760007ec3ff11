"""What is counted, what a scrape shows of it, and under which names."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from engine.errors import EngineError
from engine.messages import Failed, StepReport
from engine.request import FinishReason
from server.errors import STATUS_TABLE
from server.metrics import Metrics, describe_metrics
from server.metrics.bounds import request_tokens
from server.metrics.distribution import Distribution
from server.metrics.tally import REJECTIONS
from tests.factories import make_core, make_info, make_submit
from tests.metrics_factory import IDLE, PretendEngine, make_busy_metrics, make_finished, make_step


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """One sample of a scrape; labels that are not given may be anything. -1: there is none."""
    found = [
        sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) <= 1, f"{name} {labels} is not one series"
    return found[0] if found else -1


# --- distributions


def test_a_distribution_counts_up_to_and_including_each_bound() -> None:
    distribution = Distribution((1.0, 2.0, 5.0))
    distribution.observe((0.5, 1.0, 1.1, 5.0, 6.0))
    assert distribution.cumulative((1.0, 2.0, 5.0)) == [2, 3, 4, 5]
    assert distribution.total == pytest.approx(13.6)


def test_a_distribution_can_be_read_at_each_of_its_sets_of_bounds() -> None:
    distribution = Distribution((1.0, 3.0), (2.0, 3.0))
    distribution.observe((0.5, 1.5, 2.5, 9.0))
    assert distribution.cumulative((1.0, 3.0)) == [1, 3, 4]
    assert distribution.cumulative((2.0, 3.0)) == [2, 3, 4]
    with pytest.raises(KeyError):
        distribution.cumulative((2.5,))


def test_bounds_of_token_counts_go_up_to_the_context_length() -> None:
    assert request_tokens(64) == (1, 2, 5, 10, 20, 50)
    assert request_tokens(2000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert request_tokens(1) == (1,)


# --- steps and requests


def test_a_step_is_added_up() -> None:
    metrics = Metrics(PretendEngine())
    step = make_step(
        num_prefill_tokens=30,
        num_decode_tokens=2,
        num_rows=3,
        num_sampled_tokens=3,
        num_preempted=1,
        num_prefix_queries=40,
        num_prefix_hits=10,
        forward_s=0.02,
        ttft_s=(0.5,),
        itl_s=(0.004, 0.02),
    )
    metrics.on_report(step)
    metrics.on_report(step)
    assert value(metrics, "chairlift_prompt_tokens_total") == 80
    assert value(metrics, "chairlift_cached_prompt_tokens_total") == 20
    assert value(metrics, "chairlift_generated_tokens_total") == 6
    assert value(metrics, "chairlift_computed_tokens_total", kind="prefill") == 60
    assert value(metrics, "chairlift_computed_tokens_total", kind="decode") == 4
    assert value(metrics, "chairlift_preemptions_total") == 2
    assert value(metrics, "chairlift_step_tokens_sum") == 64
    assert value(metrics, "chairlift_step_rows_sum") == 6
    assert value(metrics, "chairlift_step_phase_seconds_sum", phase="forward") == pytest.approx(0.04)
    assert value(metrics, "chairlift_step_phase_seconds_count", phase="sample") == 2
    assert value(metrics, "chairlift_time_to_first_token_seconds_count") == 2
    assert value(metrics, "chairlift_inter_token_latency_seconds_bucket", le="0.004") == 2
    assert value(metrics, "chairlift_inter_token_latency_seconds_bucket", le="+Inf") == 4
    # the same under vLLM's names, in vLLM's buckets
    assert value(metrics, "vllm:prompt_tokens_total") == 80
    assert value(metrics, "vllm:prefix_cache_queries_total") == 80
    assert value(metrics, "vllm:prefix_cache_hits_total") == 20
    assert value(metrics, "vllm:generation_tokens_total") == 6
    assert value(metrics, "vllm:num_preemptions_total") == 2
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="32.0") == 2
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.01") == 2
    assert value(metrics, "vllm:time_per_output_token_seconds_sum") == pytest.approx(0.048)


def test_a_finished_request_is_timed_from_gate_to_gate() -> None:
    metrics = Metrics(PretendEngine())
    metrics.on_report(make_step([make_finished()]))
    seconds = {
        "chairlift_request_seconds": 7.5,
        "chairlift_request_queue_seconds": 1.0,
        "chairlift_request_prefill_seconds": 2.0,
        "chairlift_request_decode_seconds": 4.0,
        "vllm:e2e_request_latency_seconds": 7.5,
        "vllm:request_queue_time_seconds": 1.0,
        "vllm:request_prefill_time_seconds": 2.0,
        "vllm:request_decode_time_seconds": 4.0,
        "vllm:request_inference_time_seconds": 6.0,
        "vllm:request_time_per_output_token_seconds": 1.0,
        "vllm:request_prompt_tokens": 7,
        "vllm:request_generation_tokens": 5,
        "vllm:request_params_max_tokens": 20,
    }
    assert {name: value(metrics, f"{name}_sum") for name in seconds} == seconds
    assert {name: value(metrics, f"{name}_count") for name in seconds} == dict.fromkeys(seconds, 1)


def test_an_aborted_request_is_counted_but_not_timed() -> None:
    metrics = Metrics(PretendEngine())
    metrics.on_report(StepReport((make_finished(FinishReason.ABORT),)))
    assert value(metrics, "chairlift_requests_finished_total", reason="abort") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(metrics, "chairlift_request_seconds_count") == 0
    assert value(metrics, "chairlift_request_generated_tokens_count") == 0


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    metrics = Metrics(PretendEngine())
    metrics.on_report(make_step([make_finished(FinishReason.LENGTH, num_output_tokens=1)]))
    assert value(metrics, "chairlift_requests_finished_total", reason="length") == 1
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0


def test_a_failed_request_counts_as_an_error() -> None:
    metrics = Metrics(PretendEngine())
    metrics.on_report(make_step([Failed(3, EngineError("logits are not finite"))]))
    assert value(metrics, "chairlift_requests_finished_total", reason="error") == 1
    assert value(metrics, "chairlift_requests_finished_total", reason="stop") == 0


def test_a_real_core_adds_up() -> None:
    """Eight requests through the real scheduler, with too few blocks for all of them."""
    core, _ = make_core(num_blocks=6, prefix_caching=False)
    engine = PretendEngine(core.info, core.stats())
    metrics = Metrics(engine)
    prompts = [[1 + i, 2, 3, 4, 5] for i in range(8)]
    for i, prompt in enumerate(prompts):
        core.submit(make_submit(i, prompt, max_tokens=9, ignore_eos=True))
    while core.has_work:
        metrics.on_report(core.step())
        engine.stats = core.stats()
        assert value(metrics, "chairlift_requests_running") == len(core.scheduler.running)
        assert value(metrics, "chairlift_requests_waiting") == len(core.scheduler.waiting)
    assert value(metrics, "chairlift_requests_finished_total", reason="length") == 8
    assert value(metrics, "chairlift_prompt_tokens_total") == 40
    assert value(metrics, "chairlift_generated_tokens_total") == 72
    assert value(metrics, "chairlift_time_to_first_token_seconds_count") == 8
    assert value(metrics, "chairlift_inter_token_latency_seconds_count") == 64
    assert value(metrics, "chairlift_preemptions_total") > 0
    assert value(metrics, "chairlift_kv_cache_usage_ratio") == 0


# --- gauges


def test_gauges_follow_the_engine_without_a_request() -> None:
    engine = PretendEngine(stats=replace(IDLE, num_running=3, num_waiting=2, num_used_blocks=4))
    metrics = Metrics(engine)
    assert value(metrics, "chairlift_requests_running") == 3
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "chairlift_kv_cache_usage_ratio") == 0.25
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    engine.stats = IDLE
    assert value(metrics, "chairlift_requests_running") == 0
    assert value(metrics, "vllm:num_requests_waiting") == 0
    assert value(metrics, "vllm:gpu_cache_usage_perc") == 0


def test_age_of_the_last_step_and_of_the_step_in_progress() -> None:
    now = 100.0
    engine = PretendEngine()
    metrics = Metrics(engine, clock=lambda: now)
    now = 104.0
    assert value(metrics, "chairlift_last_step_age_seconds") == 4.0  # since start: there was no step yet
    assert value(metrics, "chairlift_step_in_progress_seconds") == 0.0
    engine.stats = replace(IDLE, last_step_s=102.5, step_started_s=103.0)
    assert value(metrics, "chairlift_last_step_age_seconds") == 1.5
    assert value(metrics, "chairlift_step_in_progress_seconds") == 1.0


def test_cache_config_is_what_routers_read() -> None:
    engine = PretendEngine(make_info(block_size=32, num_blocks=100, kv_cache_dtype="int8"))
    metrics = Metrics(engine, prefix_caching=False)
    labels = {"block_size": "32", "num_gpu_blocks": "100", "enable_prefix_caching": "False", "engine": "0"}
    labels["cache_dtype"] = "int8"
    assert value(metrics, "vllm:cache_config_info", **labels) == 1
    assert value(metrics, "chairlift_kv_cache_tokens") == 3200


# --- the server's own


def test_rejections_are_counted_by_reason() -> None:
    metrics = Metrics(PretendEngine())
    metrics.rejected("model_not_found")
    metrics.rejected("model_not_found")
    assert value(metrics, "chairlift_requests_rejected_total", reason="model_not_found") == 2


def test_every_status_that_refuses_is_published_from_the_start() -> None:
    codes = {row.code for row in STATUS_TABLE.values() if row.status != 500}
    assert codes <= set(REJECTIONS)


def test_reasons_cannot_grow_without_bound() -> None:
    metrics = Metrics(PretendEngine())
    for i in range(200):
        metrics.rejected(f"reason {i}")
    assert value(metrics, "chairlift_requests_rejected_total", reason="reason 0") == 1
    assert value(metrics, "chairlift_requests_rejected_total", reason="other") == 200 - (64 - len(REJECTIONS))
    assert value(metrics, "chairlift_requests_rejected_total", reason="reason 199") == -1


@pytest.mark.anyio
async def test_a_late_timer_shows_as_event_loop_lag() -> None:
    times = [0.0, 10.0, 10.31]  # at start, before the timer, after it

    def clock() -> float:
        if not times:
            raise TimeoutError("the test's end")
        return times.pop(0)

    metrics = Metrics(PretendEngine(), clock=clock)
    with pytest.raises(TimeoutError):
        await metrics.watch_event_loop(interval_s=0.01)
    times += [20.0] * 3
    assert value(metrics, "chairlift_event_loop_lag_seconds_sum") == pytest.approx(0.3)
    assert value(metrics, "chairlift_event_loop_lag_seconds_bucket", le="0.2") == 0
    assert value(metrics, "chairlift_event_loop_lag_seconds_bucket", le="0.5") == 1


# --- names and formats


def test_vllm_names_types_and_labels() -> None:
    metrics = make_busy_metrics()
    families = {f.name: f for f in parse_text(metrics.render()[0].decode()) if f.name.startswith("vllm:")}
    assert {name: family.type for name, family in families.items()} == {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:gpu_cache_usage_perc": "gauge",
        "vllm:prefix_cache_queries": "counter",
        "vllm:prefix_cache_hits": "counter",
        "vllm:num_preemptions": "counter",
        "vllm:prompt_tokens": "counter",
        "vllm:generation_tokens": "counter",
        "vllm:request_success": "counter",
        "vllm:request_prompt_tokens": "histogram",
        "vllm:request_generation_tokens": "histogram",
        "vllm:request_max_num_generation_tokens": "histogram",
        "vllm:request_params_max_tokens": "histogram",
        "vllm:iteration_tokens_total": "histogram",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:inter_token_latency_seconds": "histogram",
        "vllm:time_per_output_token_seconds": "histogram",
        "vllm:request_time_per_output_token_seconds": "histogram",
        "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:request_queue_time_seconds": "histogram",
        "vllm:request_inference_time_seconds": "histogram",
        "vllm:request_prefill_time_seconds": "histogram",
        "vllm:request_decode_time_seconds": "histogram",
        "vllm:cache_config_info": "gauge",
    }
    for family in families.values():
        for sample in family.samples:
            assert sample.labels["engine"] == "0"
            if family.name != "vllm:cache_config_info":
                assert sample.labels["model_name"] == "fake"


def test_vllm_names_can_be_left_out() -> None:
    text = make_busy_metrics(vllm_names=False).render()[0].decode()
    assert "vllm:" not in text
    assert "chairlift_requests_running" in text


def test_two_servers_in_one_process_do_not_share_counts() -> None:
    one, other = Metrics(PretendEngine()), Metrics(PretendEngine())
    one.rejected("overloaded")
    assert value(other, "chairlift_requests_rejected_total", reason="overloaded") == 0


def test_openmetrics_on_request() -> None:
    metrics = make_busy_metrics()
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(body.decode())}
    assert {"chairlift_prompt_tokens", "vllm:iteration_tokens_total"} <= names
    body, content_type = metrics.render("text/plain;version=0.0.4")
    assert content_type.startswith("text/plain; version=0.0.4")


def test_a_busy_scrape_is_quick() -> None:
    metrics = make_busy_metrics()
    best = min(_timed(metrics) for _ in range(5))
    assert best < 0.1


def test_every_metric_is_described() -> None:
    rows = {row.name: row for row in describe_metrics()}
    published = {
        f"{f.name}_total" if f.type == "counter" else f.name
        for f in parse_text(make_busy_metrics().render()[0].decode())
        if not f.name.startswith("process_")
    }
    assert set(rows) == published
    assert rows["chairlift_requests_finished_total"].labels == ("reason",)
    assert rows["chairlift_time_to_first_token_seconds"].type == "histogram"
    assert all(row.doc for row in rows.values())


def _timed(metrics: Metrics) -> float:
    start = time.thread_time()  # others may use the machine
    metrics.render()
    return time.thread_time() - start
