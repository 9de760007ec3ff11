"""ModelRunner: computes a StepPlan, and knows nothing of requests, schedules or text.

    plan -> arrays (`batch`) -> logits that are wanted (`forward`) -> tokens (`Sampler`), logprobs (`score`)

Hot path: nothing here may wait for the device before `collect`, nor loop over tokens in Python.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.kernels import to_device
from engine.kv.storage import KVStorage
from engine.model.batch import StepArrays, pack_step
from engine.model.loader import LoadedModel
from engine.plan import PlanRow, SampledRow, ScoredRow, StepPlan, StepResult, TokenLogprobs
from engine.sample.logprobs import Scores, score
from engine.sample.ops import to_host
from engine.sample.sampler import Sampler

UNUSABLE_LOGITS = "the model computed logits that are not finite for this request"


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What a step computes, in main memory once the device is done; None where nobody asks."""

    token_ids: Tensor | None = None
    """int64 [S], -1 where the logits were not usable."""
    chosen: Scores | None = None
    """Of the sampled tokens of those rows that want logprobs."""
    prompts: Scores | None = None
    """Of all rows' targets, in plan order."""


class PendingStep:
    """A launched step."""

    def __init__(self, step: StepArrays, outputs: _Outputs, clock: HostClock | DeviceClock) -> None:
        self._step = step
        self._outputs = outputs
        self._clock = clock

    def collect(self) -> StepResult:
        """Wait for the step and return what it gave."""
        forward_s, *sample_s = self._clock.intervals_s()
        return StepResult(self._sampled(), self._scored(), forward_s, sum(sample_s))

    def _sampled(self) -> tuple[SampledRow, ...]:
        if self._outputs.token_ids is None:
            return ()
        rows = zip(self._step.sampled, self._outputs.token_ids.tolist(), self._chosen_logprobs(), strict=True)
        return tuple(
            SampledRow(row.request_id, token_id, UNUSABLE_LOGITS if token_id < 0 else None, logprobs)
            for row, token_id, logprobs in rows
        )

    def _chosen_logprobs(self) -> list[TokenLogprobs | None]:
        """One for each sampled row."""
        if self._outputs.chosen is None:
            return [None] * len(self._step.sampled)
        wanted = [None if row.sampling is None else row.sampling.logprobs for row in self._step.sampled]
        unpacked = iter(self._outputs.chosen.unpack([count for count in wanted if count is not None]))
        return [None if count is None else next(unpacked) for count in wanted]

    def _scored(self) -> tuple[ScoredRow, ...]:
        if self._outputs.prompts is None:
            return ()
        all_targets = [row.scoring for row in self._step.scored if row.scoring is not None]
        unpacked = iter(self._outputs.prompts.unpack([each.num_top for each in all_targets for _ in each.targets]))
        scored = []
        for row, scoring in zip(self._step.scored, all_targets, strict=True):
            entries = [next(unpacked) for _ in scoring.targets]
            usable = tuple(entry for entry in entries if entry is not None)
            is_bad = len(usable) < len(entries)
            scored.append(
                ScoredRow(row.request_id, (), UNUSABLE_LOGITS) if is_bad else ScoredRow(row.request_id, usable)
            )
        return tuple(scored)


class HostClock:
    """Times between marks of work that is done when it returns."""

    def __init__(self) -> None:
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        """Here one interval ends and the next begins."""
        self._marks.append(time.perf_counter())

    def intervals_s(self) -> list[float]:
        """Seconds between the marks."""
        return [after - before for before, after in pairwise(self._marks)]


class DeviceClock:
    """Times between marks in the work queue of the current CUDA device."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """Here one interval ends and the next begins. Does not wait."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def intervals_s(self) -> list[float]:
        """Seconds between the marks. Waits until the device has passed the last one."""
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._marks)]


class ModelRunner:
    """Owns the model and the KV cache's tensors. One thread only."""

    def __init__(self, loaded: LoadedModel, storage: KVStorage, sampler: Sampler) -> None:
        self.storage = storage
        self.forward = loaded.forward
        self._sampler = sampler
        self._clock = DeviceClock if loaded.device.type == "cuda" else HostClock

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. On CUDA it returns while the device computes; on the CPU the step is done when it returns.

        Every layer stores the whole step's keys and values before it attends, so rows of one plan may share blocks
        that one of them fills in this step.
        """
        clock = self._clock()
        step = pack_step(plan, self.storage.block_size)
        logits = self.forward(step, self.storage)
        clock.mark()
        if not (step.sampled or step.scored):
            return PendingStep(step, _Outputs(), clock)
        num_sampled = len(step.sampled)
        outputs = _Outputs()
        if step.sampled:
            token_ids = self._sampler.sample(logits[:num_sampled] if step.scored else logits, step.sampled)
            outputs = _Outputs(to_host(token_ids), _score_chosen(logits, token_ids, step.sampled))
        if step.scored:
            outputs = replace(outputs, prompts=_score_prompts(logits[num_sampled:], step.scored))
        clock.mark()
        return PendingStep(step, outputs, clock)


def _score_chosen(logits: Tensor, token_ids: Tensor, rows: Sequence[PlanRow]) -> Scores | None:
    """The scores of the chosen tokens (-1: any) of rows that want logprobs. `logits` [at least rows, vocabulary]."""
    counts = {
        i: row.sampling.logprobs for i, row in enumerate(rows) if row.sampling and row.sampling.logprobs is not None
    }
    if not counts:
        return None
    num_top, token_ids = max(counts.values()), token_ids.clamp(min=0)
    if len(counts) == len(rows):
        return score(logits[: len(rows)], token_ids, num_top).to_host()
    index = to_device(np.array(list(counts)), logits.device)
    return score(logits[index], token_ids[index], num_top).to_host()


def _score_prompts(logits: Tensor, rows: Sequence[PlanRow]) -> Scores:
    """The scores of the rows' targets; `logits` [P, vocabulary] are those before each."""
    wanted = [(row.context, row.scoring) for row in rows if row.scoring is not None]
    targets = [np.asarray(context[scoring.targets.start : scoring.targets.stop]) for context, scoring in wanted]
    token_ids = to_device(np.concatenate(targets), logits.device)
    return score(logits, token_ids, max(scoring.num_top for _, scoring in wanted)).to_host()
