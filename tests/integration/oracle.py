"""The two ways to generate that the oracle tests compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from config.schema import SchedulerConfig
from engine.core import EngineCore, ModelInfo
from engine.kv.blocks import BlockPool
from engine.kv.manager import KVCacheManager
from engine.kv.storage import KVCapacity, KVStorage
from engine.messages import Failed, TokensOut
from engine.model.loader import LoadedModel
from engine.model.runner import ModelRunner
from engine.sample.sampler import Sampler
from engine.scheduler import Scheduler
from tests.factories import make_info, make_submit
from tests.factories_models import save_tiny_model, tiny_config

LEAST_MARGIN = 1e-4
"""Between the oracle's best and second-best logit: nearer than this, rounding alone could decide."""


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    max_tokens: int


class NearTieError(Exception):
    """The oracle's own choice hangs on rounding."""


def generate_alone(directory: Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Each prompt's greedy output by transformers' own `generate()`. Raises NearTieError."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    outputs = []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt.token_ids]),
            do_sample=False,
            max_new_tokens=prompt.max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(result.logits).topk(2).values
        if (best[:, 0] - best[:, 1]).min() < LEAST_MARGIN:
            raise NearTieError
        outputs.append(result.sequences[0, len(prompt.token_ids) :].tolist())
    return outputs


def make_case(
    directory: Path, prompts: Sequence[Prompt], model_type: str, **overrides: object
) -> tuple[Path, list[list[int]]]:
    """A tiny random model of this family, and the oracle's outputs, for the first seed without near ties."""
    config = tiny_config(model_type, **overrides)
    for seed in range(5):
        path = save_tiny_model(directory / str(seed), config, seed)
        try:
            return path, generate_alone(path, prompts)
        except NearTieError:
            continue
    raise AssertionError("five seeds with near ties: something else is wrong")


def make_core(
    loaded: LoadedModel,
    *,
    block_size: int,
    num_blocks: int,
    prefix_caching: bool = True,
    cache_dtype: torch.dtype | None = None,
    **scheduler: object,
) -> EngineCore:
    """An engine core over a loaded model and a KV cache of this size, by default in the model's type."""
    capacity = KVCapacity(num_blocks, block_size)
    specs = [layer.spec for layer in loaded.layers]
    kind = cache_dtype or loaded.dtype
    storage = KVStorage.allocate(specs, capacity, kind, loaded.device, loaded.kernels.empty_cache)
    kv = KVCacheManager(BlockPool(num_blocks), block_size=block_size, prefix_caching=prefix_caching, secret=b"test")
    info: ModelInfo = make_info(
        max_model_len=min(loaded.max_model_len, capacity.num_tokens),
        vocab_size=loaded.vocab_size,
        eos_token_ids=frozenset(),
        block_size=block_size,
        num_blocks=num_blocks,
    )
    config = SchedulerConfig(**scheduler)  # type: ignore[arg-type]
    return EngineCore(Scheduler(config, kv), ModelRunner(loaded, storage, Sampler()), info)


def generate_packed(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    max_num_batched_tokens: int,
    block_size: int = 4,
    num_blocks: int = 64,
    prefix_caching: bool = True,
    cache_dtype: torch.dtype | None = None,
    steps_between: int = 2,
    least_preemptions: int = 0,
) -> list[list[int]]:
    """The prompts' greedy outputs by the engine; one more prompt arrives every `steps_between` steps."""
    core = make_core(
        loaded,
        block_size=block_size,
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        cache_dtype=cache_dtype,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    outputs: list[list[int]] = [[] for _ in prompts]
    arrivals = iter(enumerate(prompts))
    num_steps = num_preemptions = 0
    while True:
        if num_steps % steps_between == 0 and (arrival := next(arrivals, None)) is not None:
            request_id, prompt = arrival
            core.submit(make_submit(request_id, prompt.token_ids, max_tokens=prompt.max_tokens, temperature=0))
        if not core.has_work:
            break
        report = core.step()
        for event in report.events:
            assert not isinstance(event, Failed), event
            if isinstance(event, TokensOut):
                outputs[event.request_id].extend(event.token_ids)
        assert report.stats is not None
        num_preemptions += report.stats.num_preempted
        num_steps += 1
        core.check_integrity()
    assert num_preemptions >= least_preemptions
    return outputs
