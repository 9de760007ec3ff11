"""The same prompts both ways, over the same weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from config.schema import EngineConfig
from engine.build import build_engine
from engine.core import EngineCore, ModelInfo
from engine.messages import Failed, Finished, Submit, TokensOut
from engine.model.resolve import resolve_model
from engine.params import SamplingParams
from engine.plan import PendingStep, Runner, StepPlan
from engine.progress import Progress
from engine.static import StaticRequest, StaticRun, generate_in_waves, load_plain_model
from engine.text.tokenizer import Tokenizer
from server.explain.jobs import Job, make_jobs
from server.explain.timeline import Timeline, continuous_timeline, static_timeline


@dataclass(frozen=True, slots=True)
class ContinuousRun:
    """What the engine made of the jobs, in their order."""

    outputs: tuple[tuple[int, ...], ...]
    plans: tuple[StepPlan, ...]
    finished_s: tuple[float, ...]
    """When each output was complete, from the start of the run."""

    @property
    def elapsed_s(self) -> float:
        """Seconds for all of it."""
        return max(self.finished_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs, and what they computed."""

    info: ModelInfo
    jobs: Sequence[Job]
    static: StaticRun
    continuous: ContinuousRun
    static_timeline: Timeline
    continuous_timeline: Timeline
    texts: tuple[str, ...]
    """What the engine's outputs say."""

    @property
    def model_name(self) -> str:
        """What the model is called, without the directories or the owner before it."""
        return self.info.name.rstrip("/").rpartition("/")[-1]

    @property
    def static_finished_s(self) -> list[float]:
        """When each job's wave was over: nobody gets an answer before."""
        return [wave.ended_s for wave in self.static.waves for _ in range(wave.num_rows)]

    def first_difference(self, index: int) -> int | None:
        """Where the two outputs of job `index` first differ; None: nowhere."""
        one, other = self.static.outputs[index], self.continuous.outputs[index]
        if one == other:
            return None
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    @property
    def outputs_agree(self) -> bool:
        """Whether both ways gave the same tokens for every job."""
        return self.static.outputs == self.continuous.outputs


@dataclass(slots=True)
class RecordingRunner:
    """Keeps a copy of every plan, and lets `runner` compute it."""

    runner: Runner
    plans: list[StepPlan] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Note the plan and start the step."""
        rows = (replace(row, block_ids=tuple(row.block_ids), token_ids=tuple(row.token_ids)) for row in plan.rows)
        self.plans.append(StepPlan(tuple(rows)))  # a plan's block tables are the scheduler's own, and change later
        return self.runner.launch(plan)


def compare(config: EngineConfig, prompts: Sequence[tuple[str, int]], progress: Progress) -> Comparison:
    """Run `prompts` (text, length of the output) by static and by continuous batching, greedily.

    Raises ConfigError when the model cannot be had or the prompts cannot be used.
    """
    model = config.model
    path = resolve_model(model.model, revision=model.revision, cache_dir=model.cache_dir, progress=progress)
    tokenizer = Tokenizer.load(path)
    jobs = make_jobs(prompts, tokenizer)
    num_slots = config.scheduler.max_num_seqs
    core, _ = build_engine(_fitted(config, jobs), progress)
    info = core.info
    continuous = run_continuous(core, jobs, progress)
    del core  # the same weights are loaded once more, untouched by the engine: let there be room for them
    gc.collect()
    progress("loading the model for static batching")
    plain = load_plain_model(path, torch.device(info.device), getattr(torch, info.dtype))
    requests = [StaticRequest(job.token_ids, job.num_output_tokens) for job in jobs]
    static = generate_in_waves(plain, requests, wave_size=num_slots, progress=progress)
    return Comparison(
        info=info,
        jobs=jobs,
        static=static,
        continuous=continuous,
        static_timeline=static_timeline(static.waves, jobs),
        continuous_timeline=continuous_timeline(continuous.plans, jobs, num_slots),
        texts=tuple(map(tokenizer.decode, continuous.outputs)),
    )


def run_continuous(core: EngineCore, jobs: Sequence[Job], progress: Progress) -> ContinuousRun:
    """Submit all jobs to an idle engine at once, and step until they are done. Raises the error of one that fails."""
    recorder = RecordingRunner(core.runner)
    core.runner = recorder
    outputs: list[list[int]] = [[] for _ in jobs]
    finished_s = [0.0] * len(jobs)
    num_tokens = sum(job.num_output_tokens for job in jobs)
    started_s = time.perf_counter()
    try:
        for index, job in enumerate(jobs):
            core.submit(Submit(index, job.token_ids, _params(job)))
        while core.has_work:
            for event in core.step().events:
                match event:
                    case TokensOut():
                        outputs[event.request_id] += event.token_ids
                    case Finished():
                        finished_s[event.request_id] = time.perf_counter() - started_s
                    case Failed():
                        raise event.error
            progress("continuous batching", sum(map(len, outputs)) / num_tokens)
    finally:
        core.runner = recorder.runner
    return ContinuousRun(tuple(map(tuple, outputs)), tuple(recorder.plans), tuple(finished_s))


def _params(job: Job) -> SamplingParams:
    return SamplingParams(max_tokens=job.num_output_tokens, temperature=0, ignore_eos=True)


def _fitted(config: EngineConfig, jobs: Sequence[Job]) -> EngineConfig:
    """The settings with a KV cache for all jobs at once: nobody is preempted, and no prefix is forgotten."""
    lengths = [job.num_prompt_tokens + job.num_output_tokens for job in jobs]
    size = config.cache.block_size
    num_tokens = sum(-(-length // size) * size for length in lengths)
    return replace(
        config,
        model=replace(config.model, max_model_len=max(lengths)),
        cache=replace(config.cache, kv_cache_tokens=num_tokens),
    )
