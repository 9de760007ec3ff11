"""A closed loop of requests: so many are open at any time, and whoever is done makes room for the next.

The same requests also by static batching (`engine.static`), in waves of that size: the baseline.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from engine.bench.requests import Request, check_room, raise_failures, random_prompt
from engine.core import EngineCore, ModelInfo
from engine.messages import Abort, Finished
from engine.static import StaticRequest, generate_in_waves, load_plain_model


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What the requests look like. Lengths are drawn evenly from mean x (1 - spread) to mean x (1 + spread)."""

    num_requests: int
    input_len: int = 128
    output_len: int = 64
    spread: float = 0.5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What a load took."""

    concurrency: int
    """Requests that were open at a time; of static batching, those in a wave."""
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    ttft_p50_s: float | None = None
    """None for static batching, where nobody gets a token before the wave is done."""
    itl_p50_s: float | None = None
    """None for static batching, and where no request had two tokens."""

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens, of those that were asked for."""
        return self.num_output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt tokens too."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds


def make_requests(info: ModelInfo, spec: LoadSpec) -> list[Request]:
    """The load's requests, in order: same spec, same requests, and those that `loadtest` sends for this seed.

    Raises ConfigError when the largest does not fit.
    """
    rng = random.Random(spec.seed)

    def around(mean: int) -> int:
        return max(1, int(mean * (1 + rng.uniform(-spec.spread, spec.spread))))

    requests = []
    for _ in range(spec.num_requests):
        input_len, output_len = around(spec.input_len), around(spec.output_len)
        requests.append(Request(random_prompt(info, input_len, rng), output_len))
    check_room(info, 1, max(len(request.prompt_token_ids) + request.num_output_tokens for request in requests))
    return requests


def run_continuous(core: EngineCore, requests: Sequence[Request], concurrency: int) -> LoadRun:
    """The requests through an idle engine, `concurrency` at a time. Raises the error of one that fails."""
    ttft_s: list[float] = []
    itl_s: list[float] = []
    waiting = iter(enumerate(requests))
    started = time.perf_counter()
    try:
        for _, (request_id, request) in zip(range(concurrency), waiting, strict=False):
            core.submit(request.submit(request_id))
        while core.has_work:
            report = raise_failures(core.step())
            if report.stats is not None:
                ttft_s += report.stats.ttft_s
                itl_s += report.stats.itl_s
            num_done = sum(isinstance(event, Finished) for event in report.events)
            for _, (request_id, request) in zip(range(num_done), waiting, strict=False):
                core.submit(request.submit(request_id))
        seconds = time.perf_counter() - started
    finally:
        for request_id in range(len(requests)):
            core.abort(Abort(request_id))
        core.flush()
    return _run(requests, concurrency, seconds, ttft_s, itl_s)


def run_static(path: Path, info: ModelInfo, requests: Sequence[Request], concurrency: int) -> LoadRun:
    """The requests in padded waves of `concurrency`, by the model in directory `path` as transformers alone runs it.

    The engine's type and device, with torch's own kernels.
    """
    model = load_plain_model(path, torch.device(info.device), getattr(torch, info.dtype))
    static = [StaticRequest(request.prompt_token_ids, request.num_output_tokens) for request in requests]
    run = generate_in_waves(model, static, wave_size=concurrency)
    return _run(requests, concurrency, run.elapsed_s, [], [])


def _run(
    requests: Sequence[Request], concurrency: int, seconds: float, ttft_s: list[float], itl_s: list[float]
) -> LoadRun:
    return LoadRun(
        concurrency=concurrency,
        num_requests=len(requests),
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        num_output_tokens=sum(request.num_output_tokens for request in requests),
        seconds=seconds,
        ttft_p50_s=median(ttft_s) if ttft_s else None,
        itl_p50_s=median(itl_s) if itl_s else None,
    )
