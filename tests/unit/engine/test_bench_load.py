"""The offline load is the load client's."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

import loadtest.workload
from engine.bench.load import LoadSpec, make_requests
from engine.errors import ConfigError


def info(**changes: Any) -> Any:
    sizes = {"vocab_size": 49152, "max_model_len": 4096, "block_size": 32, "kv_cache_tokens": 8192}
    return types.SimpleNamespace(**(sizes | changes))


def test_the_same_requests_as_over_http() -> None:
    requests = make_requests(info(), LoadSpec(5, seed=7))
    jobs = loadtest.workload.make_jobs(loadtest.workload.LoadSpec(num_requests=5, seed=7), "any")
    sent = [(tuple(body["prompt"]), body["max_tokens"]) for body in (json.loads(job.body) for job in jobs)]
    assert [(request.prompt_token_ids, request.num_output_tokens) for request in requests] == sent


def test_a_small_vocabulary_is_kept_to() -> None:
    requests = make_requests(info(vocab_size=50), LoadSpec(5))
    assert max(max(request.prompt_token_ids) for request in requests) == 49


def test_a_load_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="tokens of KV cache; it has 64"):
        make_requests(info(kv_cache_tokens=64), LoadSpec(5))
