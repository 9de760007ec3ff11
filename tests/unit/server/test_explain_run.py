"""The engine's side of `chairlift explain`: jobs run through a core, and what is kept of its steps."""

from __future__ import annotations

import pytest

from config.schema import EngineConfig
from engine.errors import ConfigError, EngineError
from server.explain.jobs import DEFAULT_PROMPTS, make_jobs
from server.explain.run import compare, run_continuous
from tests import factories_explain
from tests.factories import expected_output, make_core
from tests.factories_text import byte_level


def ignore(stage: str, done: float | None = None) -> None:
    pass


def test_outputs_are_those_of_prompts_run_alone_and_as_long_as_asked() -> None:
    jobs = factories_explain.make_jobs((3, 9, 4), (150, 5, 1))
    core, _ = make_core(num_blocks=64, max_num_seqs=2)
    run = run_continuous(core, jobs, ignore)
    assert run.outputs == tuple(
        tuple(expected_output(job.token_ids, job.num_output_tokens, frozenset())) for job in jobs
    )
    assert any(0 in output for output in run.outputs), "an end-of-text token ends nothing here"
    assert run.elapsed_s == max(run.finished_s)
    assert min(run.finished_s) > 0


def test_plans_are_kept_as_they_were() -> None:
    jobs = factories_explain.make_jobs((3, 9), (20, 20))
    core, runner = make_core(num_blocks=64)
    plans = run_continuous(core, jobs, ignore).plans
    assert len(plans) == len(runner.plans)
    lengths = [len(plans[i].rows[0].block_ids) for i in range(len(plans))]
    assert lengths == [-(-(3 + i) // 4) for i in range(20)], "block tables grow from step to step"


def test_the_engine_gets_its_runner_back() -> None:
    core, _ = make_core()
    runner = core.runner
    run_continuous(core, factories_explain.make_jobs((3,), (2,)), ignore)
    assert core.runner is runner


def test_a_request_that_fails_is_told() -> None:
    core, fake = make_core()
    runner = core.runner
    fake.poisoned.add(0)
    with pytest.raises(EngineError, match="not finite"):
        run_continuous(core, factories_explain.make_jobs((3,), (2,)), ignore)
    assert core.runner is runner


def test_progress_goes_to_the_end() -> None:
    done: list[float | None] = []
    core, _ = make_core()
    jobs = factories_explain.make_jobs((3,), (4,))
    run_continuous(core, jobs, lambda stage, share=None: done.append(share))
    assert done == [0.25, 0.5, 0.75, 1.0]


def test_jobs_have_letters_and_the_built_in_caps() -> None:
    jobs = make_jobs(DEFAULT_PROMPTS, byte_level())
    assert [job.label for job in jobs] == list("ABCDEF")
    assert [job.num_output_tokens for job in jobs] == [6, 50, 300, 30, 180, 45]
    assert jobs[0].num_computed_tokens == jobs[0].num_prompt_tokens + 5


@pytest.mark.parametrize("prompts", [[], [("a", 1)] * 27, [("a", 1), ("", 1)]])
def test_prompts_that_cannot_be_explained_with(prompts: list[tuple[str, int]]) -> None:
    with pytest.raises(ConfigError, match=r"prompt"):
        make_jobs(prompts, byte_level())


def test_an_unknown_model_is_a_config_error() -> None:
    from dataclasses import replace

    config = EngineConfig()
    with pytest.raises(ConfigError, match="no such file"):
        compare(replace(config, model=replace(config.model, model="./nowhere")), DEFAULT_PROMPTS, ignore)
