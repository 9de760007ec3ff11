"""Steps of a tiny real model: what comes back for whom, and that no row harms another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config.schema import ModelConfig
from engine.kv.storage import KVCapacity, KVStorage
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.params import SamplingParams
from engine.plan import PlanRow, PromptScoring, SampledRow, StepPlan
from engine.sample.sampler import Sampler
from tests.factories_models import save_tiny_model, tiny_config

GREEDY = SamplingParams(temperature=0)
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = save_tiny_model(tmp_path_factory.mktemp("model"), tiny_config("llama"))
    return load_model(path, ModelConfig(device="cpu", dtype="float32", kernels="reference", num_threads=1))


@pytest.fixture
def runner(loaded: LoadedModel) -> ModelRunner:
    specs = [layer.spec for layer in loaded.layers]
    capacity = KVCapacity(num_blocks=16, block_size=BLOCK_SIZE)
    storage = KVStorage.allocate(specs, capacity, loaded.dtype, loaded.device, loaded.kernels.empty_cache)
    return ModelRunner(loaded, storage, Sampler())


def run(runner: ModelRunner, *rows: PlanRow) -> dict[int, int]:
    result = runner.launch(StepPlan(rows)).collect()
    assert all(row.error is None for row in result.sampled)
    return {row.request_id: row.token_id for row in result.sampled}


def expected_token(loaded: LoadedModel, tokens: list[int]) -> int:
    loaded.model.set_attn_implementation("eager")
    try:
        return int(loaded.model(torch.tensor([tokens])).logits[0, -1].argmax())
    finally:
        loaded.model.set_attn_implementation("chairlift_paged")


def test_sampled_rows_in_plan_order(runner: ModelRunner, loaded: LoadedModel) -> None:
    prompts = {3: [1, 2, 3, 4, 5], 9: [8, 8, 8], 4: [7]}
    rows = [PlanRow(i, prompt, 0, [2 * n, 2 * n + 1], GREEDY) for n, (i, prompt) in enumerate(prompts.items())]
    result = runner.launch(StepPlan((*rows[:2], PlanRow(77, [5, 5], 0, [9], None), rows[2]))).collect()
    assert result.sampled == tuple(SampledRow(i, expected_token(loaded, prompt)) for i, prompt in prompts.items())
    assert result.forward_s > 0
    assert result.sample_s > 0


def test_a_step_without_samples_fills_the_cache(runner: ModelRunner, loaded: LoadedModel) -> None:
    result = runner.launch(StepPlan((PlanRow(0, [1, 2, 3, 4, 5], 0, [6, 2], None),))).collect()
    assert result.sampled == ()
    assert result.forward_s > 0
    assert result.sample_s == 0
    assert run(runner, PlanRow(0, [9], 5, [6, 2], GREEDY)) == {0: expected_token(loaded, [1, 2, 3, 4, 5, 9])}


def test_rows_of_one_step_may_share_blocks_filled_in_it(runner: ModelRunner, loaded: LoadedModel) -> None:
    """Prefix caching relies on it: the second request starts behind a block that the first one fills just now."""
    prefix = [1, 2, 3, 4]
    tokens = run(
        runner,
        PlanRow(0, [*prefix, 5], 0, [3, 8], GREEDY),
        PlanRow(1, [6, 7], 4, [3, 1], GREEDY),
    )
    assert tokens == {0: expected_token(loaded, [*prefix, 5]), 1: expected_token(loaded, [*prefix, 6, 7])}


def test_a_row_that_is_not_finite_fails_alone(runner: ModelRunner) -> None:
    prompts = {0: [1, 2, 3], 1: [4, 5, 6, 7, 8], 2: [9, 10]}
    rows = [PlanRow(i, prompt, 0, [2 * i, 2 * i + 1], GREEDY) for i, prompt in prompts.items()]
    healthy = run(runner, *rows)
    decoding = [PlanRow(i, [healthy[i]], len(prompt), [2 * i, 2 * i + 1], GREEDY) for i, prompt in prompts.items()]
    expected = run(runner, *decoding)
    runner.storage.keys[0][2] = torch.nan  # request 1's first block
    good, bad, also_good = runner.launch(StepPlan(tuple(decoding))).collect().sampled
    assert bad.request_id == 1
    assert bad.token_id == -1
    assert bad.error == "the model computed logits that are not finite for this request"
    assert {good.request_id: good.token_id, also_good.request_id: also_good.token_id} == {
        0: expected[0],
        2: expected[2],
    }


def test_sampling_by_seed_and_position(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0)
    rows = [PlanRow(i, [1, 2, 3], 0, [i], params, seed=seed) for i, seed in enumerate((11, 12, 11))]
    tokens = [run(runner, *rows) for _ in range(2)]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] == tokens[0][2]
    assert run(runner, rows[2])[2] == tokens[0][2]


def scoring(context: list[int], start: int, count: int, block_ids: list[int], **fields: object) -> PlanRow:
    """A row in the middle of a prompt, which scores the tokens after its own."""
    targets = PromptScoring(range(start + 1, start + count + 1), 2)
    row = PlanRow(7, context[start : start + count], start, block_ids, None, context=context, scoring=targets)
    return replace(row, **fields)  # type: ignore[arg-type]


def test_prompts_are_scored_beside_sampled_rows(runner: ModelRunner, loaded: LoadedModel) -> None:
    context = [1, 2, 3, 4, 5, 6]
    decoding = PlanRow(0, [9, 8], 0, [9], SamplingParams(temperature=0, logprobs=1))
    result = runner.launch(StepPlan((scoring(context, 0, 3, [1, 2]), decoding))).collect()
    (sampled,), (scored,) = result.sampled, result.scored
    assert (scored.request_id, [entry.token_id for entry in scored.logprobs]) == (7, [2, 3, 4])
    assert [len(entry.top) for entry in scored.logprobs] == [2, 2, 2]
    assert [entry.top[0][0] for entry in scored.logprobs] == [expected_token(loaded, context[:i]) for i in (1, 2, 3)]
    assert sampled.logprobs is not None
    assert sampled.token_id == sampled.logprobs.token_id == sampled.logprobs.top[0][0]
    assert sampled.logprobs.rank == 1


def test_scores_that_are_not_finite_fail_their_row_alone(runner: ModelRunner) -> None:
    context = [1, 2, 3, 4, 5, 6, 7]
    run(runner, PlanRow(7, context[:4], 0, [1], GREEDY), PlanRow(8, context[:4], 0, [2], GREEDY))
    runner.storage.keys[0][1] = torch.nan
    rows = (scoring(context, 4, 2, [1, 3]), scoring(context, 4, 2, [2, 4], request_id=8))
    bad, good = runner.launch(StepPlan(rows)).collect().scored
    assert (bad.request_id, bad.logprobs) == (7, ())
    assert bad.error == "the model computed logits that are not finite for this request"
    assert (good.request_id, len(good.logprobs), good.error) == (8, 2, None)
