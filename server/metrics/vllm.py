"""The `vllm:*` metrics: vLLM's names, types, labels and buckets, for dashboards, autoscalers and routers made for it.

The names that vLLM has dropped or renamed since (`gpu_cache_usage_perc`, `time_per_output_token_seconds`) are here
beside their successors, since what reads them is not updated in step. The help texts say what is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from engine.core import ModelInfo
from engine.messages import EngineStats
from server.metrics import bounds
from server.metrics.families import Families
from server.metrics.own import kv_usage
from server.metrics.tally import Tally

_ENGINE = "0"  # vLLM numbers its engines; there is one here


def vllm_families(info: ModelInfo, tally: Tally, stats: EngineStats, *, prefix_caching: bool) -> Iterator[Metric]:
    """All `vllm:*` families now."""
    make = Families({"model_name": info.name, "engine": _ENGINE})
    yield from _state(make, stats)
    yield from _counters(make, tally)
    yield from _sizes(make, tally, info)
    yield from _latencies(make, tally)
    yield _cache_config(info, prefix_caching)


def _state(make: Families, stats: EngineStats) -> Iterator[Metric]:
    yield make.gauge("vllm:num_requests_running", "Requests that run now.", stats.num_running)
    yield make.gauge("vllm:num_requests_waiting", "Requests that wait for a place now.", stats.num_waiting)
    yield make.gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is full.", kv_usage(stats))
    yield make.gauge("vllm:gpu_cache_usage_perc", "Old name of vllm:kv_cache_usage_perc.", kv_usage(stats))


def _counters(make: Families, tally: Tally) -> Iterator[Metric]:
    counters = (
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", tally.num_prompt_tokens),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", tally.num_cached_tokens),
        ("vllm:num_preemptions", "Running requests put back into the queue.", tally.num_preemptions),
        ("vllm:prompt_tokens", "Prompt tokens, cached ones too.", tally.num_prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated.", tally.num_generated_tokens),
    )
    for name, doc, value in counters:
        yield make.counter(name, doc, value)
    yield make.counters(
        "vllm:request_success",
        "Requests that ended, by how.",
        ("finished_reason",),
        {(reason,): count for reason, count in tally.finished.items()},
    )


def _sizes(make: Families, tally: Tally, info: ModelInfo) -> Iterator[Metric]:
    lengths = bounds.request_tokens(info.max_model_len)
    histograms = (
        ("vllm:request_prompt_tokens", "Prompt tokens of a request.", tally.prompt_lengths),
        ("vllm:request_generation_tokens", "Tokens generated for a request.", tally.output_lengths),
        ("vllm:request_max_num_generation_tokens", "Same here: every choice is a request.", tally.output_lengths),
        ("vllm:request_params_max_tokens", "Most tokens that a request may generate.", tally.max_tokens),
    )
    for name, doc, observed in histograms:
        yield make.histogram(name, doc, observed, lengths)
    yield make.histogram(
        "vllm:iteration_tokens_total", "Tokens in one step.", tally.step_tokens, bounds.VLLM_STEP_TOKENS
    )


def _latencies(make: Families, tally: Tally) -> Iterator[Metric]:
    gap = "From one token of a request to its next."
    histograms = (
        ("time_to_first_token", "From arrival to first token.", tally.ttft_s, bounds.VLLM_FIRST_TOKEN_SECONDS),
        ("inter_token_latency", gap, tally.itl_s, bounds.VLLM_TOKEN_SECONDS),
        ("time_per_output_token", f"Old name: {gap}", tally.itl_s, bounds.VLLM_TOKEN_SECONDS),
        ("request_time_per_output_token", "A request's mean gap.", tally.tpot_s, bounds.VLLM_TOKEN_SECONDS),
        ("e2e_request_latency", "From arrival to end.", tally.e2e_s, bounds.VLLM_REQUEST_SECONDS),
        ("request_queue_time", "From arrival to first step.", tally.queue_s, bounds.VLLM_REQUEST_SECONDS),
        ("request_inference_time", "First step to last token.", tally.inference_s, bounds.VLLM_REQUEST_SECONDS),
        ("request_prefill_time", "First step to first token.", tally.prefill_s, bounds.VLLM_REQUEST_SECONDS),
        ("request_decode_time", "First token to last.", tally.decode_s, bounds.VLLM_REQUEST_SECONDS),
    )
    for name, doc, observed, edges in histograms:
        yield make.histogram(f"vllm:{name}_seconds", doc, observed, edges)


def _cache_config(info: ModelInfo, prefix_caching: bool) -> Metric:
    """The gauge that routers read the size of the KV cache from. vLLM gives it no `model_name`."""
    labels = {
        "block_size": str(info.block_size),
        "cache_dtype": info.kv_cache_dtype,
        "enable_prefix_caching": str(prefix_caching),
        "engine": _ENGINE,
        "num_gpu_blocks": str(info.num_blocks),
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, in labels.", labels=tuple(labels))
    family.add_metric(tuple(labels.values()), 1)
    return family
