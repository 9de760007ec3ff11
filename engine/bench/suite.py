"""All measurements that are asked for, one after the other, on one engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from config.schema import EngineConfig
from engine.bench.load import LoadRun, LoadSpec, make_requests, run_continuous, run_static
from engine.bench.requests import Request
from engine.bench.steps import Decode, Prefill, measure_decode, measure_prefill
from engine.build import build_engine
from engine.core import EngineCore, ModelInfo
from engine.model.resolve import resolve_model
from engine.progress import Progress

PREFILL_ROUNDS = 3
MIN_REQUESTS = 8
"""Of a load, however few are open at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """What to measure; what is empty is left out."""

    prompt_lens: Sequence[int] = ()
    """Of prefill, in tokens."""
    decode_rows: Sequence[int] = ()
    context_len: int = 200
    """Of each row."""
    num_steps: int = 40
    """Decode steps to take the median of."""
    concurrency: Sequence[int] = ()
    """Of the closed loops."""
    requests_per_client: int = 3
    input_len: int = 128
    output_len: int = 64
    static: bool = False
    """The closed loops' requests by static batching, too."""
    seed: int = 0

    @property
    def max_num_seqs(self) -> int:
        """Requests that the engine must take at once."""
        return max((*self.decode_rows, *self.concurrency), default=1)

    def load(self, concurrency: int) -> LoadSpec:
        """The requests of one closed loop; no two loops share any."""
        num_requests = max(MIN_REQUESTS, self.requests_per_client * concurrency)
        return LoadSpec(num_requests, self.input_len, self.output_len, seed=self.seed + concurrency)


@dataclass(frozen=True, slots=True)
class Results:
    """What was measured, in the order asked for."""

    info: ModelInfo
    prefill: Sequence[Prefill]
    decode: Sequence[Decode]
    continuous: Sequence[LoadRun]
    static: Sequence[LoadRun]


def run_bench(config: EngineConfig, spec: BenchSpec, progress: Progress) -> Results:
    """Measure. Raises ConfigError when the model cannot be had, or what is asked for does not fit it."""
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=spec.max_num_seqs))
    core, _ = build_engine(config, progress)
    info = core.info
    loads = [(concurrency, make_requests(info, spec.load(concurrency))) for concurrency in spec.concurrency]
    progress("warming up")
    measure_prefill(core, min(64, info.max_model_len - 1), rounds=2, seed=spec.seed - 1)
    prefill, decode, continuous = list(_prefill(core, spec, progress)), list(_decode(core, spec, progress)), []
    for concurrency, requests in loads:
        progress(f"a load of {len(requests)} requests, {concurrency} at a time")
        continuous.append(run_continuous(core, requests, concurrency))
    del core  # static batching loads the weights once more: let there be room for them
    gc.collect()
    static = list(_static(config, info, loads, progress)) if spec.static else []
    return Results(info, prefill, decode, continuous, static)


def _prefill(core: EngineCore, spec: BenchSpec, progress: Progress) -> Iterator[Prefill]:
    for number, length in enumerate(spec.prompt_lens):
        progress(f"prompts of {length} tokens")
        yield measure_prefill(core, length, rounds=PREFILL_ROUNDS, seed=spec.seed + 1000 + number)


def _decode(core: EngineCore, spec: BenchSpec, progress: Progress) -> Iterator[Decode]:
    for num_rows in spec.decode_rows:
        progress(f"decoding {num_rows} rows")
        yield measure_decode(
            core, num_rows, spec.context_len, num_steps=spec.num_steps, seed=spec.seed + 2000 + num_rows
        )


def _static(
    config: EngineConfig, info: ModelInfo, loads: Sequence[tuple[int, Sequence[Request]]], progress: Progress
) -> Iterator[LoadRun]:
    model = config.model
    path = resolve_model(model.model, revision=model.revision, cache_dir=model.cache_dir, progress=progress)
    for concurrency, requests in loads:
        progress(f"static batching in waves of {concurrency}")
        yield run_static(path, info, requests, concurrency)
