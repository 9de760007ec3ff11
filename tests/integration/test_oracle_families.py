"""Greedy output is that of transformers' `generate()`, token for token, for every family the engine says it serves.

The oracle runs each prompt alone, whole, with the model's own (eager) attention and cache. The engine runs them packed
together, arriving at different times, in chunks, through the paged cache. Float32, weights random but far apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from config.schema import KernelBackend, ModelConfig
from engine.model.families import SUPPORTED
from engine.model.loader import LoadedModel, load_model
from tests.cpu_kernels import build_kernels
from tests.factories_models import FAMILIES
from tests.integration.oracle import Prompt, generate_packed, make_case

PROMPT_LENS = (3, 21, 40, 9, 33)
OUTPUT_LENS = (14, 6, 11, 18, 9)
CHUNKS = (7, 512)
OTHER_CHUNKS = (1, 32)
IN_DEPTH = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_oss",
    "olmo2",
    "granite",
    "smollm3",
    "deepseek_v3",
)
"""Families that run with every size of chunk, some of them slow; the others with one that cuts every prompt. The torch
kernels, which know nothing of families, are slow for those."""


BLOCK_SIZES = {"reference": 4, "cpu": 16}
"""The smallest blocks that each back end is tried with."""

Case = tuple[Path, list[list[int]]]


def make_prompts() -> list[Prompt]:
    numbers = random.Random(0)
    prompts = [[numbers.randrange(128) for _ in range(length)] for length in PROMPT_LENS]
    prompts[4][:20] = prompts[2][:20]  # found in the prefix cache
    return [Prompt(tuple(p), n) for p, n in zip(prompts, OUTPUT_LENS, strict=True)]


def load(path: Path, kernels: KernelBackend = "reference") -> LoadedModel:
    config = ModelConfig(device="cpu", dtype="float32", kernels=kernels, num_threads=1)
    return load_model(path, config, block_size=BLOCK_SIZES[kernels])


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """A family's tiny model and the oracle's outputs, made once for all back ends."""

    @cache
    def make(model_type: str) -> Case:
        return make_case(tmp_path_factory.mktemp(model_type), make_prompts(), model_type)

    return make


def with_both_kernels(model_type: str) -> list[ParameterSet]:
    marks = [] if model_type in IN_DEPTH else [pytest.mark.slow]
    return [pytest.param(model_type, "cpu"), pytest.param(model_type, "reference", marks=marks)]


@pytest.mark.parametrize(
    ("model_type", "kernels"), [case for model_type in sorted(FAMILIES) for case in with_both_kernels(model_type)]
)
def test_family(model_type: str, kernels: KernelBackend, case_of: Callable[[str], Case]) -> None:
    check_family(model_type, kernels, case_of, CHUNKS if model_type in IN_DEPTH else (7,))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", BLOCK_SIZES)
@pytest.mark.parametrize("model_type", IN_DEPTH)
def test_other_chunks(model_type: str, kernels: KernelBackend, case_of: Callable[[str], Case]) -> None:
    check_family(model_type, kernels, case_of, OTHER_CHUNKS)


def check_family(
    model_type: str, kernels: KernelBackend, case_of: Callable[[str], Case], chunks: Sequence[int]
) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    if kernels == "cpu":
        build_kernels()
    prompts = make_prompts()
    path, expected = case_of(model_type)
    loaded = load(path, kernels)
    for chunk in chunks:
        outputs = generate_packed(loaded, prompts, max_num_batched_tokens=chunk, block_size=BLOCK_SIZES[kernels])
        assert outputs == expected, f"chunks of {chunk}"


def test_every_supported_family_is_proved() -> None:
    assert sorted(FAMILIES) == sorted(SUPPORTED)
    assert set(IN_DEPTH) < set(FAMILIES)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_blocks_and_preemption(model_type: str, block_size: int, tmp_path: Path) -> None:
    """A cache that cannot hold all requests at once: some are preempted and recomputed, and nobody can tell."""
    prompts = make_prompts()
    path, expected = make_case(tmp_path, prompts, model_type)
    outputs = generate_packed(
        load(path),
        prompts,
        max_num_batched_tokens=64,
        block_size=block_size,
        num_blocks=72 // block_size,
        least_preemptions=1,
    )
    assert outputs == expected


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3, 4, 5]},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope(rope: dict[str, object], tmp_path: Path) -> None:
    prompts = make_prompts()
    parameters = rope | {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
    path, expected = make_case(tmp_path, prompts, "llama", rope_parameters=parameters)
    assert generate_packed(load(path), prompts, max_num_batched_tokens=7) == expected
