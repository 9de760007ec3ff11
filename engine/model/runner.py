"""ModelRunner: computes a StepPlan, and knows nothing of requests, schedules or text.

    plan -> arrays (`batch`) -> logits of the sampled rows (`forward`) -> tokens (`Sampler`)

Hot path: nothing here may wait for the device before `collect`, nor loop over tokens in Python.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch
from torch import Tensor

from engine.kv.storage import KVStorage
from engine.model.batch import pack_step
from engine.model.loader import LoadedModel
from engine.plan import PlanRow, SampledRow, StepPlan, StepResult
from engine.sample.sampler import Sampler

UNUSABLE_LOGITS = "the model computed logits that are not finite for this request"


class PendingStep:
    """A launched step."""

    def __init__(self, sampled: tuple[PlanRow, ...], tokens: Tensor | None, clock: HostClock | DeviceClock) -> None:
        self._sampled = sampled
        self._tokens = tokens  # int64 [S] on the host, -1 where the logits were not usable; None if S = 0
        self._clock = clock

    def collect(self) -> StepResult:
        """Wait for the step and return what it gave."""
        forward_s, *sample_s = self._clock.intervals_s()
        tokens = [] if self._tokens is None else self._tokens.tolist()
        return StepResult(
            sampled=tuple(
                SampledRow(row.request_id, token, error=UNUSABLE_LOGITS if token < 0 else None)
                for row, token in zip(self._sampled, tokens, strict=True)
            ),
            forward_s=forward_s,
            sample_s=sum(sample_s),
        )


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
        self._forward = loaded.forward
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
        logits = self._forward(step, self.storage)
        clock.mark()
        if not step.sampled:
            return PendingStep((), None, clock)
        chosen = self._sampler.sample(logits, step.sampled)
        tokens = torch.where(chosen.bad, -1, chosen.token_ids)
        if tokens.is_cuda:
            tokens = torch.empty_like(tokens, device="cpu", pin_memory=True).copy_(tokens, non_blocking=True)
        clock.mark()
        return PendingStep(step.sampled, tokens, clock)
