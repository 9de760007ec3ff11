"""With the C kernels a request's logits are the same, bit for bit, whatever else is in its steps.

Neighbours, arrivals, chunks, prefix hits and preemption are drawn at random; tokens and logits of each request are
compared with those it gets alone, whole. One prompt is longer than a range of attention, so that its ranges are split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from config.schema import DType, ModelConfig, Quantization
from engine.model.loader import LoadedModel, load_model
from engine.plan import PlanRow
from engine.sample.sampler import Sampler
from tests.cpu_kernels import build_kernels
from tests.factories_models import save_tiny_model, tiny_config
from tests.integration.oracle import Prompt, generate_packed

PROMPT_LENS = (3, 40, 21, 540, 33, 1)
BLOCK_SIZE = 16
ENOUGH_BLOCKS = 80

Logits = dict[tuple[int, int], bytes]
"""(request, position) -> the logits of the token that comes there, as bits."""


def make_prompts() -> list[Prompt]:
    numbers = random.Random(0)
    prompts = [[numbers.randrange(128) for _ in range(length)] for length in PROMPT_LENS]
    prompts[4][:20] = prompts[1][:20]  # found in the prefix cache
    return [Prompt(tuple(prompt), 7) for prompt in prompts]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[DType, Quantization], LoadedModel]:
    build_kernels()
    path = save_tiny_model(tmp_path_factory.mktemp("llama"), tiny_config("llama", max_position_embeddings=1024))

    @cache
    def load(dtype: DType, quantization: Quantization) -> LoadedModel:
        config = ModelConfig(device="cpu", dtype=dtype, quantization=quantization, kernels="cpu", num_threads=1)
        return load_model(path, config, block_size=BLOCK_SIZE)

    return load


def generate(
    loaded: LoadedModel, prompts: Sequence[Prompt], cache_dtype: torch.dtype | None, **schedule: int | bool
) -> tuple[list[list[int]], Logits]:
    """Tokens of each request, and the logits that each was chosen from."""
    seen: Logits = {}
    sample = Sampler.sample

    def watched(self: Sampler, logits: Tensor, rows: Sequence[PlanRow]) -> Tensor:
        for row, numbers in zip(rows, logits.float(), strict=True):
            bits = numbers.numpy().tobytes()
            assert seen.setdefault((row.request_id, row.end), bits) == bits, "computed anew after a preemption"
        return sample(self, logits, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "sample", watched)
        outputs = generate_packed(
            loaded,
            prompts,
            block_size=BLOCK_SIZE,
            cache_dtype=cache_dtype,
            **schedule,  # type: ignore[arg-type]
        )
    return outputs, seen


@pytest.mark.parametrize(
    ("dtype", "quantization", "cache_dtype"),
    [
        ("float32", "none", None),
        ("bfloat16", "none", None),
        ("float32", "int8", None),
        ("bfloat16", "int8", None),
        ("float32", "none", torch.int8),
        ("bfloat16", "none", torch.int8),
        pytest.param("float32", "none", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_logits_do_not_depend_on_the_schedule(
    dtype: DType,
    quantization: Quantization,
    cache_dtype: torch.dtype | None,
    model_of: Callable[[DType, Quantization], LoadedModel],
) -> None:
    loaded, prompts = model_of(dtype, quantization), make_prompts()
    alone: Logits = {}
    outputs = []
    for index, prompt in enumerate(prompts):
        (output,), logits = generate(
            loaded, [prompt], cache_dtype, max_num_batched_tokens=1024, num_blocks=ENOUGH_BLOCKS
        )
        outputs.append(output)
        alone |= {(index, position): bits for (_, position), bits in logits.items()}

    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
    @given(
        max_num_batched_tokens=st.integers(7, 700),
        steps_between=st.integers(1, 5),
        prefix_caching=st.booleans(),
        num_blocks=st.sampled_from([36, 40, ENOUGH_BLOCKS]),  # the long prompt alone takes 35
    )
    def check(**schedule: int | bool) -> None:
        together, logits = generate(loaded, prompts, cache_dtype, **schedule)
        assert together == outputs
        assert logits == alone

    check()
