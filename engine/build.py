"""From an EngineConfig to an engine that is ready: find the model, load it, size the KV cache, join the parts.

Importing this brings torch and transformers. Call `build_engine` in the thread that will run the engine.
"""

from __future__ import annotations

import logging
import secrets

import torch

from config.schema import EngineConfig
from engine.core import EngineCore, ModelInfo
from engine.errors import ConfigError
from engine.faults import install
from engine.isolation import IsolatingRunner
from engine.kv.blocks import BlockPool
from engine.kv.manager import KVCacheManager
from engine.kv.storage import KVCapacity, KVStorage, bytes_per_token, plan_capacity
from engine.machine import format_bytes, keep_freed_memory
from engine.model.device import free_memory, resolve_cache_dtype, resolve_device
from engine.model.loader import LoadedModel, load_model
from engine.model.resolve import resolve_model
from engine.model.runner import ModelRunner
from engine.model.sampling_defaults import sampling_defaults
from engine.params import MAX_LOGPROBS, SamplingParams
from engine.plan import PlanRow, PromptScoring, StepPlan
from engine.progress import Progress
from engine.sample.sampler import Sampler
from engine.scheduler import MAX_SCORED_TOKENS, Scheduler
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CPU_SHARE = 0.25
"""Share of the free main memory that the KV cache takes unless told otherwise; the system needs the rest."""
CUDA_SHARE = 0.9
"""Share of the device memory that is free beside weights and a step's activations."""


def build_engine(config: EngineConfig, progress: Progress | None = None) -> tuple[EngineCore, Tokenizer]:
    """An engine core over the model that `config` names, and the model's tokenizer.

    Raises ConfigError (ModelError for the model) when the settings cannot be honoured.
    """
    _check_asked_memory(config)
    path = resolve_model(
        config.model.model, revision=config.model.revision, cache_dir=config.model.cache_dir, progress=progress
    )
    tokenizer = Tokenizer.load(path)
    defaults = sampling_defaults(path) if config.model.generation_config == "auto" else {}
    loaded = load_model(path, config.model, progress, block_size=config.cache.block_size)
    cache_dtype = resolve_cache_dtype(config.cache.kv_cache_dtype, loaded.dtype, loaded.kernels)
    capacity = _size_cache(config, loaded, cache_dtype)
    max_model_len = _fit_context(config, loaded, capacity)
    storage = _allocate(loaded, capacity, cache_dtype)
    info = ModelInfo(
        name=config.model.served_model_name or config.model.model,
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids | tokenizer.eos_token_ids,
        num_parameters=loaded.num_parameters,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        kernels=loaded.kernels.NAME,
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        kv_cache_dtype=str(cache_dtype).removeprefix("torch."),
        sampling_defaults=defaults,
    )
    kv = KVCacheManager(
        BlockPool(capacity.num_blocks),
        block_size=capacity.block_size,
        prefix_caching=config.cache.prefix_caching,
        secret=secrets.token_bytes(32),
    )
    if loaded.device.type == "cpu":
        keep_freed_memory()
    sampler = Sampler(loaded.kernels.choose_tokens)
    runner = ModelRunner(loaded, storage, sampler)
    scheduler = Scheduler(config.scheduler, kv)
    install(config.faults.faults, scheduler=scheduler, runner=runner, sampler=sampler, tokenizer=tokenizer)
    return EngineCore(scheduler, IsolatingRunner(runner, capacity.block_size), info), tokenizer


def _check_asked_memory(config: EngineConfig) -> None:
    """Refuse before the model loads what could not be had even without it; `plan_capacity` checks with it."""
    device = resolve_device(config.model.device)
    asked, free = config.cache.kv_cache_memory, free_memory(device)
    if asked is not None and asked > free:
        raise ConfigError(
            f"the KV cache is to have {format_bytes(asked)}; {format_bytes(free)} of memory are free on {device}",
            setting="kv_cache_memory",
            hint="ask for less, or leave it out: the cache then takes its share of what is free",
        )


def _size_cache(config: EngineConfig, loaded: LoadedModel, cache_dtype: torch.dtype) -> KVCapacity:
    """How many blocks the KV cache gets, from what is free once weights (and on CUDA a full step) have their share."""
    free_bytes = free_memory(loaded.device)
    share = CPU_SHARE
    if loaded.device.type == "cuda":
        free_bytes -= _peak_of_a_step(config, loaded, cache_dtype)
        share = CUDA_SHARE
    return plan_capacity(
        config.cache,
        token_bytes=bytes_per_token([layer.spec for layer in loaded.layers], cache_dtype),
        free_bytes=free_bytes,
        default_bytes=int(free_bytes * share),
        useful_tokens=config.scheduler.max_num_seqs * loaded.max_model_len,
    )


def _peak_of_a_step(config: EngineConfig, loaded: LoadedModel, cache_dtype: torch.dtype) -> int:
    """Device bytes that a step of full size takes beside weights and KV cache; found by running one."""
    block_size = config.cache.block_size
    num_tokens = config.scheduler.max_num_batched_tokens
    num_rows = min(config.scheduler.max_num_seqs, num_tokens)
    length = min(-(-num_tokens // num_rows), loaded.max_model_len)
    blocks_each = -(-length // block_size)
    storage = _allocate(loaded, KVCapacity(num_rows * blocks_each, block_size), cache_dtype)
    tokens = [0] * length
    scoring = PromptScoring(range(1, min(length, 1 + MAX_SCORED_TOKENS // num_rows)), MAX_LOGPROBS)
    rows = tuple(
        PlanRow(
            request_id=i,
            token_ids=tokens,
            start=0,
            block_ids=range(i * blocks_each, (i + 1) * blocks_each),
            sampling=SamplingParams(top_p=0.5, logprobs=MAX_LOGPROBS),
            context=tokens,
            scoring=scoring,
        )
        for i in range(num_rows)
    )
    before = torch.cuda.memory_allocated(loaded.device)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    ModelRunner(loaded, storage, Sampler(loaded.kernels.choose_tokens)).launch(StepPlan(rows)).collect()
    peak = torch.cuda.max_memory_allocated(loaded.device) - before
    del storage
    torch.cuda.empty_cache()
    return peak


def _fit_context(config: EngineConfig, loaded: LoadedModel, capacity: KVCapacity) -> int:
    """The context length to serve: never more than the KV cache holds, so that any request fits it alone."""
    if loaded.max_model_len <= capacity.num_tokens:
        return loaded.max_model_len
    if config.model.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {loaded.max_model_len}, but the KV cache holds {capacity.num_tokens} tokens",
            setting="max_model_len",
            hint="make the KV cache larger (kv_cache_memory, kv_cache_tokens) or max_model_len smaller",
        )
    logger.warning(
        "the context length is cut from %d to %d tokens, which is what the KV cache holds",
        loaded.max_model_len,
        capacity.num_tokens,
    )
    return capacity.num_tokens


def _allocate(loaded: LoadedModel, capacity: KVCapacity, cache_dtype: torch.dtype) -> KVStorage:
    specs = [layer.spec for layer in loaded.layers]
    return KVStorage.allocate(specs, capacity, cache_dtype, loaded.device, loaded.kernels.empty_cache)
