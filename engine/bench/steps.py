"""Prefill at given lengths; decode steps at given numbers of rows and a context, against the memory limit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TypeGuard

from engine.bench.memory import kv_bytes_per_token, read_bandwidth, weight_bytes
from engine.bench.parts import watch_parts
from engine.bench.requests import Request, check_room, random_prompt, run_all
from engine.core import EngineCore
from engine.isolation import IsolatingRunner
from engine.messages import StepStats
from engine.model.runner import ModelRunner

NUM_WATCHED = 6
"""Decode steps whose parts are timed, after those that count."""

SAMPLING, SCHEDULER, REST = "sampling", "scheduler", "the rest"


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts of one length, one at a time."""

    num_tokens: int
    seconds: float
    """Median; from submitting the prompt to its first token."""

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Decode:
    """Steps in which `num_rows` requests get a token each, their contexts around `context_len` tokens."""

    num_rows: int
    context_len: int
    """Mean of the rows, over the steps."""
    step_s: float
    """Median."""
    parts_s: dict[str, float]
    """Medians by part, the rest included; without those that cannot be told apart here."""
    read_bytes: float
    """Weights, and the keys and values of all contexts; layers with sliding windows read less."""
    bandwidth: float
    """Bytes a second, measured right before and after; the better one."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all rows."""
        return self.num_rows / self.step_s

    @property
    def roofline_s(self) -> float:
        """What reading alone takes."""
        return self.read_bytes / self.bandwidth

    @property
    def roofline_share(self) -> float:
        """1: as fast as memory is read. Many rows compute more than they read, and cannot come near it."""
        return self.roofline_s / self.step_s


def measure_prefill(core: EngineCore, num_tokens: int, *, rounds: int, seed: int) -> Prefill:
    """Median of `rounds` prompts. Raises ConfigError when such a prompt does not fit."""
    check_room(core.info, 1, num_tokens + 1)
    rng = random.Random(seed)
    prompts = [random_prompt(core.info, num_tokens, rng) for _ in range(rounds)]
    return Prefill(num_tokens, median(_seconds(core, Request(prompt, 1)) for prompt in prompts))


def _seconds(core: EngineCore, request: Request) -> float:
    return sum(seconds for _, seconds in run_all(core, [request]))


def measure_decode(core: EngineCore, num_rows: int, context_len: int, *, num_steps: int, seed: int) -> Decode:
    """Median of `num_steps` steps. Raises ConfigError when so much context does not fit."""
    runner = model_runner(core)
    num_watched = NUM_WATCHED if core.info.device == "cpu" else 0
    requests = _decoding_requests(core, num_rows, context_len, num_steps, num_watched, seed)
    before = read_bandwidth(runner.forward.device)
    steps = run_all(core, requests)
    decoding = ((report.stats, seconds) for report, seconds in steps if _all_decode(report.stats, num_rows))
    step_s = [seconds for _, seconds in islice(decoding, num_steps)]
    parts = []
    if num_watched:
        with watch_parts(runner) as times:
            parts = [times.take() | _engine_parts(stats) for stats, _ in islice(decoding, num_watched)]
    steps.close()
    bandwidth = max(before, read_bandwidth(runner.forward.device))
    return Decode(
        num_rows=num_rows,
        context_len=context_len,
        step_s=median(step_s),
        parts_s=_with_rest(parts, median(step_s)),
        read_bytes=weight_bytes(runner.forward.model) + num_rows * context_len * kv_bytes_per_token(runner.storage),
        bandwidth=bandwidth,
    )


def _decoding_requests(
    core: EngineCore, num_rows: int, context_len: int, num_steps: int, num_watched: int, seed: int
) -> list[Request]:
    """Requests that all decode for `num_steps` steps with `context_len` tokens on average, then `num_watched` more.

    Prompts are computed some at a time, and those that are done decode meanwhile: outputs must be that much longer.
    """
    budget = max(1, core.scheduler.config.max_num_batched_tokens - num_rows)
    num_meanwhile = -(-num_rows * context_len // budget)
    prompt_len = max(1, context_len - (num_meanwhile + num_steps) // 2)
    num_outputs = 1 + num_meanwhile + num_steps + num_watched
    check_room(core.info, num_rows, prompt_len + num_outputs)
    rng = random.Random(seed)
    return [Request(random_prompt(core.info, prompt_len, rng), num_outputs) for _ in range(num_rows)]


def _all_decode(stats: StepStats | None, num_rows: int) -> TypeGuard[StepStats]:
    return stats is not None and stats.num_decode_tokens == stats.num_sampled_tokens == num_rows


def _engine_parts(stats: StepStats) -> dict[str, float]:
    return {SAMPLING: stats.sample_s, SCHEDULER: stats.schedule_s + stats.update_s}


def _with_rest(steps: Sequence[dict[str, float]], step_s: float) -> dict[str, float]:
    """Medians by part. What they leave of a step is Python, torch's small operations, and the embedding."""
    if not steps:
        return {}
    parts = {name: median(step.get(name, 0.0) for step in steps) for name in steps[0]}
    return parts | {REST: max(0.0, step_s - sum(parts.values()))}


def model_runner(core: EngineCore) -> ModelRunner:
    """The runner that computes an engine's steps, out of what stands around it."""
    runner = core.runner.runner if isinstance(core.runner, IsolatingRunner) else core.runner
    assert isinstance(runner, ModelRunner), runner
    return runner
