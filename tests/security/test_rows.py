"""Requests that are computed together: what one asks for touches no other, nor the one that takes its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from config.schema import ModelConfig
from engine.core import EngineCore, check_fit
from engine.errors import RequestError
from engine.messages import Failed, TokensOut
from engine.model.loader import LoadedModel, load_model
from engine.params import SamplingParams
from tests.factories import make_submit
from tests.factories_models import save_tiny_model, tiny_config
from tests.integration.oracle import make_core

VOCAB_SIZE = 128

# Each could leave something behind in its row: a mask, counts, biases, a seed, a grammar's end.
SELFISH = [
    SamplingParams(max_tokens=3, temperature=0, allowed_token_ids=(7,)),
    SamplingParams(max_tokens=9, temperature=1, seed=1, allowed_token_ids=(7, 8)),
    SamplingParams(max_tokens=5, temperature=0, logit_bias={9: 100.0, 10: -100.0}),
    SamplingParams(max_tokens=7, temperature=5, seed=2, top_k=3, repetition_penalty=50.0),
    SamplingParams(max_tokens=4, temperature=2, seed=3, frequency_penalty=2.0, presence_penalty=-2.0),
    SamplingParams(max_tokens=6, temperature=0, stop_token_ids=tuple(range(64)), min_tokens=2),
    SamplingParams(max_tokens=8, temperature=1, seed=4, min_p=1.0, top_p=0.01, logprobs=20, prompt_logprobs=20),
]
PLAIN = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1, seed=11, ignore_eos=True),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), tiny_config("llama", vocab_size=VOCAB_SIZE))
    return load_model(Path(path), ModelConfig(device="cpu", dtype="float32", kernels="reference", num_threads=1))


def core_of(loaded: LoadedModel, max_num_seqs: int) -> EngineCore:
    return make_core(loaded, block_size=4, num_blocks=64, max_num_seqs=max_num_seqs)


def tokens_of(core: EngineCore, asked: Sequence[SamplingParams]) -> Iterator[list[int]]:
    """What each gets. They have different prompts, of different lengths."""
    for number, params in enumerate(asked):
        core.submit(replace(make_submit(number, [20 + number % 7] * (3 + number % 5)), params=params))
    tokens: list[list[int]] = [[] for _ in asked]
    while core.has_work:
        for event in core.step().events:
            assert not isinstance(event, Failed), event.error
            if isinstance(event, TokensOut):
                tokens[event.request_id] += event.token_ids
    yield from tokens


def mixed(first: Sequence[SamplingParams], second: Sequence[SamplingParams]) -> list[SamplingParams]:
    """In turn, so that each stands beside, and comes after, one of the others."""
    return [each for pair in zip(first, second, strict=True) for each in pair]


@pytest.mark.parametrize("max_num_seqs", [2, 3, 16])
def test_what_one_asks_for_touches_no_other(loaded: LoadedModel, max_num_seqs: int) -> None:
    """With few places, rows are taken over by those who come next."""
    plain = (PLAIN * len(SELFISH))[: len(SELFISH)]
    together = list(tokens_of(core_of(loaded, max_num_seqs), mixed(SELFISH, plain)))
    unasked = SamplingParams(max_tokens=1, temperature=0)
    alone = list(tokens_of(core_of(loaded, 1), mixed([unasked] * len(plain), plain)))
    assert together[1::2] == alone[1::2]
    assert together[0] == [7] * 3  # they did have their way
    assert set(together[2]) <= {7, 8}


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (VOCAB_SIZE,)},
        {"allowed_token_ids": (7, -1)},
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"stop_token_ids": (VOCAB_SIZE + 5,)},
        {"stop_token_ids": (-VOCAB_SIZE,)},
    ],
)
def test_no_token_is_another_rows(loaded: LoadedModel, fields: dict[str, object]) -> None:
    """A token beyond the vocabulary would be a cell of the next row, a negative one of the row before."""
    core = core_of(loaded, 2)
    with pytest.raises(RequestError, match="this model's ids are 0 to 127") as caught:
        check_fit(core.info, [1, 2], SamplingParams(**fields))  # type: ignore[arg-type]
    assert caught.value.param in fields
    with pytest.raises(RequestError, match="prompt has token id"):
        check_fit(core.info, [1, VOCAB_SIZE], SamplingParams())
