"""Both ways to batch over the fake model of `factories`, for the tests of `chairlift explain`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from string import ascii_uppercase

from engine.static import StaticRun, Wave
from server.explain.jobs import Job
from server.explain.run import Comparison, run_continuous
from server.explain.timeline import continuous_timeline, static_timeline
from tests.factories import VOCAB_SIZE, expected_output, make_core

PROMPT_LENS = (5, 12, 35, 20, 9, 32)
CAPS = (6, 50, 300, 30, 180, 45)


def make_jobs(prompt_lens: Sequence[int] = PROMPT_LENS, caps: Sequence[int] = CAPS) -> list[Job]:
    """Jobs A, B ...; with the default lengths F begins with the first 25 tokens of C."""
    prompts = [[(7 * i + 3 * j * j + 1) % VOCAB_SIZE for j in range(length)] for i, length in enumerate(prompt_lens)]
    if prompt_lens == PROMPT_LENS:
        prompts[5][:25] = prompts[2][:25]
    return [
        Job(label, f"prompt {label}", tuple(prompt), cap)
        for label, prompt, cap in zip(ascii_uppercase, prompts, caps, strict=False)
    ]


def make_waves(jobs: Sequence[Job], wave_size: int) -> tuple[Wave, ...]:
    """The waves of these jobs, with steps of 40 ms."""
    groups = [jobs[i : i + wave_size] for i in range(0, len(jobs), wave_size)]
    ends = list(accumulate(max(job.num_output_tokens for job in group) for group in groups))
    return tuple(
        Wave(
            first=i * wave_size,
            num_rows=len(group),
            padded_prompt_len=max(job.num_prompt_tokens for job in group),
            num_steps=end - begin,
            started_s=begin * 0.04,
            first_token_s=(begin + 1) * 0.04,
            ended_s=end * 0.04,
        )
        for i, (group, begin, end) in enumerate(zip(groups, [0, *ends], ends, strict=False))
    )


def make_comparison(jobs: Sequence[Job], *, slots: int = 3, token_budget: int = 16) -> Comparison:
    """What `server.explain.run.compare` makes of a real model; the static outputs are those of prompts run alone."""
    core, _ = make_core(
        num_blocks=sum(job.num_computed_tokens // 8 + 1 for job in jobs) * 2,
        block_size=8,
        max_num_seqs=slots,
        max_num_batched_tokens=token_budget,
    )
    continuous = run_continuous(core, jobs, lambda stage, done=None: None)
    waves = make_waves(jobs, slots)
    outputs = [tuple(expected_output(job.token_ids, job.num_output_tokens, frozenset())) for job in jobs]
    return Comparison(
        info=core.info,
        jobs=jobs,
        static=StaticRun(tuple(outputs), waves),
        continuous=continuous,
        static_timeline=static_timeline(waves, jobs),
        continuous_timeline=continuous_timeline(continuous.plans, jobs, slots),
        texts=tuple(f"text {job.label}" for job in jobs),
    )
