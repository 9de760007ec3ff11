"""Narrower KV caches: what the setting does to a whole engine, and how little to logits and greedy output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from config.schema import CacheConfig, EngineConfig, KernelBackend, KVCacheDType, ModelConfig
from engine.bench.requests import Request, run_all
from engine.bench.steps import model_runner
from engine.build import build_engine
from engine.errors import ConfigError
from engine.kv.storage import KVCapacity, KVStorage
from engine.messages import TokensOut
from engine.model.batch import pack_step
from engine.model.loader import LoadedModel, load_model
from engine.model.probe import deviation
from engine.plan import PlanRow, StepPlan
from tests.cpu_kernels import build_kernels
from tests.factories_models import save_tiny_model, tiny_config
from tests.factories_text import hf_byte_level

LENGTH = 90
BLOCK_SIZE = 16
Load = Callable[[str, KernelBackend], LoadedModel]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build_kernels()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @cache
    def load(model_type: str, kernels: KernelBackend) -> LoadedModel:
        path = save_tiny_model(tmp_path_factory.mktemp(model_type), tiny_config(model_type))
        config = ModelConfig(device="cpu", dtype="float32", kernels=kernels, num_threads=1)
        return load_model(path, config, block_size=BLOCK_SIZE)

    return load


def logits_of(loaded: LoadedModel, cache_dtype: torch.dtype) -> Tensor:
    """[LENGTH, vocab_size] of one sequence, in chunks of 32."""
    specs = [layer.spec for layer in loaded.layers]
    capacity = KVCapacity(-(-LENGTH // BLOCK_SIZE), BLOCK_SIZE)
    storage = KVStorage.allocate(specs, capacity, cache_dtype, loaded.device, loaded.kernels.empty_cache)
    tokens = np.random.default_rng(0).integers(loaded.vocab_size, size=LENGTH).tolist()
    pieces = []
    for start in range(0, LENGTH, 32):
        row = PlanRow(0, tokens[start : start + 32], start, tuple(range(capacity.num_blocks)), None)
        step = pack_step(StepPlan((row,)), BLOCK_SIZE).with_all_logits()
        pieces.append(loaded.forward(step, storage).clone())
    return torch.cat(pieces)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "qwen3"])
def test_logits_are_near(load: Load, model_type: str) -> None:
    """With windows, soft-caps, sinks, norms of keys; a few tokens may go to other experts. And the C kernels, fused,
    store what the definition says, but for keys that were rounded otherwise before."""
    by_kernels = []
    for kernels in get_args(KernelBackend)[1:]:
        loaded = load(model_type, kernels)
        exact, small, half = (logits_of(loaded, each) for each in (torch.float32, torch.int8, torch.bfloat16))
        off = deviation(exact, small)
        assert 1e-4 < off.median() < 0.02
        assert off.quantile(0.9) < 0.1
        assert 1e-5 < deviation(exact, half).median() < off.median()
        by_kernels.append(small)
    assert deviation(*by_kernels).median() < 1e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 8 dims, 2 key heads and 2 layers, and a tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    config = tiny_config("llama", vocab_size=512, max_position_embeddings=4096, num_key_value_heads=2)
    save_tiny_model(directory, config)
    hf_byte_level().save_pretrained(directory)
    return directory


def engine_config(path: Path, kernels: KernelBackend, kv_cache_dtype: KVCacheDType) -> EngineConfig:
    model = ModelConfig(model=str(path), device="cpu", dtype="float32", kernels=kernels, num_threads=1)
    return EngineConfig(model=model, cache=CacheConfig(kv_cache_memory=1 << 20, kv_cache_dtype=kv_cache_dtype))


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("kv_cache_dtype", "used", "token_bytes"),
    [
        ("auto", torch.float32, 2 * 2 * 2 * 8 * 4),
        ("int8", torch.int8, 2 * 2 * 2 * (8 + 4)),
        ("bfloat16", torch.bfloat16, 2 * 2 * 2 * 8 * 2),
    ],
)
def test_more_tokens_in_the_same_memory(
    tiny: Path, kernels: KernelBackend, kv_cache_dtype: KVCacheDType, used: torch.dtype, token_bytes: int
) -> None:
    core, _ = build_engine(engine_config(tiny, kernels, kv_cache_dtype))
    assert core.info.num_blocks == (1 << 20) // (32 * token_bytes)
    assert core.info.kv_cache_tokens == core.info.num_blocks * 32
    assert core.info.kv_cache_dtype == str(used).removeprefix("torch.")
    storage = model_runner(core).storage
    assert {cache.dtype for cache in (*storage.keys, *storage.values)} == {used}
    if kernels == "reference":  # the others pad heads of 8 to 16
        allocated = sum(cache.untyped_storage().nbytes() for cache in (*storage.keys, *storage.values))
        assert (1 << 20) - 32 * token_bytes < allocated <= 1 << 20


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_a_prompt_that_is_found_again_is_answered_alike(tiny: Path, kernels: KernelBackend) -> None:
    """What one request has stored in int8 the next one reads."""
    core, _ = build_engine(engine_config(tiny, kernels, "int8"))
    prompt = tuple(np.random.default_rng(1).integers(3, 500, size=100).tolist())
    outputs, hits = [], 0
    for _ in range(2):
        steps = [report for report, _ in run_all(core, [Request(prompt, 12)])]
        outputs.append([event.token_ids for step in steps for event in step.events if isinstance(event, TokensOut)])
        hits += sum(step.stats.num_prefix_hits for step in steps if step.stats is not None)
    assert hits == 96
    assert outputs[0] == outputs[1]


def test_a_cache_that_is_wider_than_the_model_is_refused(tiny: Path) -> None:
    config = engine_config(tiny, "cpu", "float32")
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    with pytest.raises(ConfigError, match="no KV cache in float32 for a model in bfloat16") as caught:
        build_engine(config)
    assert caught.value.setting == "kv_cache_dtype"
