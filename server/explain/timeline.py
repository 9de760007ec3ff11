"""What was computed, step by step and slot by slot: one form for static and for continuous batching. Pure.

Steps count from 0 here; people are shown them from 1. The scheduler knows no slots, only how many requests may run at
once: a *slot* is a place among them, and a newcomer takes the lowest free one.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from engine.plan import PlanRow, StepPlan
from engine.static import Wave
from server.explain.jobs import Job


class Phase(enum.Enum):
    """What a share is for. The scheduler makes no such difference; it helps to see one."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "idle"
    """Computed for a request that is done already, because its batch goes on."""


@dataclass(frozen=True, slots=True)
class Share:
    """One request's part of one step: tokens at positions `start ... start + num_tokens - 1`."""

    request: int
    slot: int
    phase: Phase
    start: int
    """How many of the request's tokens are in the KV cache already."""
    num_tokens: int
    num_padding: int = 0
    """Tokens computed beside these, for nothing."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


Step = tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A request in a slot, in one phase, from step `first` to before step `end`."""

    request: int
    slot: int
    phase: Phase
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets on."""

    request: int
    slot: int
    step: int
    num_cached_tokens: int
    """Tokens of its prompt that the prefix cache had."""
    previous: int | None = None
    """Who had the slot before,"""
    left_at: int | None = None
    """and the last step in which it did."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """All steps of one run."""

    num_slots: int
    steps: tuple[Step, ...]

    @property
    def num_useful(self) -> int:
        """Tokens computed that somebody wanted."""
        return sum(share.num_tokens for step in self.steps for share in step)

    @property
    def num_prompt_padding(self) -> int:
        """Padding in front of shorter prompts."""
        return sum(s.num_padding for step in self.steps for s in step if s.phase is Phase.PREFILL)

    @property
    def num_idle(self) -> int:
        """Tokens computed for requests that were done."""
        return sum(s.num_padding for step in self.steps for s in step if s.phase is Phase.IDLE)

    @property
    def num_computed(self) -> int:
        """All tokens that went through the model."""
        return self.num_useful + self.num_prompt_padding + self.num_idle

    @property
    def num_padded_to_rectangles(self) -> int:
        """Tokens that these steps would take if each were a batch padded to its longest row."""
        return sum(padded_size(step) for step in self.steps)

    def last_step(self, request: int) -> int:
        """The step that made the request's last token."""
        return max(i for i, step in enumerate(self.steps) for s in step if s.request == request and s.num_tokens)

    def segments(self) -> Iterator[Segment]:
        """Every slot's history, as few pieces as it takes."""
        for slot in range(self.num_slots):
            places = [(i, share) for i, step in enumerate(self.steps) for share in step if share.slot == slot]
            for (request, phase), group in groupby(places, lambda place: (place[1].request, place[1].phase)):
                indices = [index for index, _ in group]
                yield Segment(request, slot, phase, indices[0], indices[-1] + 1)

    def admissions(self) -> list[Admission]:
        """Who got on when, and whose slot it took, in order."""
        admissions: list[Admission] = []
        holders: dict[int, tuple[int, int]] = {}  # slot -> its last request, and that one's last step
        seen: set[int] = set()
        for index, step in enumerate(self.steps):
            for share in step:
                if share.request not in seen:
                    seen.add(share.request)
                    previous, left_at = holders.get(share.slot, (None, None))
                    admissions.append(Admission(share.request, share.slot, index, share.start, previous, left_at))
            holders |= {share.slot: (share.request, index) for share in step}
        return admissions


def padded_size(step: Step) -> int:
    """Tokens that a step would take as a batch padded to its longest row."""
    return len(step) * max(share.num_tokens for share in step)


def static_timeline(waves: Sequence[Wave], jobs: Sequence[Job]) -> Timeline:
    """What the waves computed."""
    steps = tuple(_wave_step(wave, jobs, index) for wave in waves for index in range(wave.num_steps))
    return Timeline(max(wave.num_rows for wave in waves), steps)


def _wave_step(wave: Wave, jobs: Sequence[Job], index: int) -> Step:
    """The wave's step `index`: it makes every output's token `index`, also for those that are shorter."""
    shares = []
    for slot in range(wave.num_rows):
        request = wave.first + slot
        length = jobs[request].num_prompt_tokens
        if index == 0:
            share = Share(request, slot, Phase.PREFILL, 0, length, wave.padded_prompt_len - length)
        elif index < jobs[request].num_output_tokens:
            share = Share(request, slot, Phase.DECODE, length + index - 1, 1)
        else:
            share = Share(request, slot, Phase.IDLE, length + index - 1, 0, 1)
        shares.append(share)
    return tuple(shares)


def continuous_timeline(plans: Sequence[StepPlan], jobs: Sequence[Job], num_slots: int) -> Timeline:
    """What the engine's steps computed. A plan's request ids are places in `jobs`."""
    last = {row.request_id: index for index, plan in enumerate(plans) for row in plan.rows}
    free = list(range(num_slots))
    slots: dict[int, int] = {}
    steps = []
    for index, plan in enumerate(plans):
        for row in plan.rows:
            if row.request_id not in slots:
                slots[row.request_id] = heapq.heappop(free)
        steps.append(tuple(_share(row, slots[row.request_id], jobs[row.request_id]) for row in plan.rows))
        for row in plan.rows:
            if last[row.request_id] == index:
                heapq.heappush(free, slots[row.request_id])
    return Timeline(num_slots, tuple(steps))


def _share(row: PlanRow, slot: int, job: Job) -> Share:
    phase = Phase.DECODE if row.start >= job.num_prompt_tokens else Phase.PREFILL
    return Share(row.request_id, slot, phase, row.start, len(row.token_ids))


def pick_steps(timeline: Timeline) -> list[int]:
    """The one or two steps that show most, in order.

    First choice: a later chunk of a long prompt beside as many decodes as there are, and a newcomer that takes the slot
    of one that has left, beside decodes. Where one is not to be had, a step of decodes only stands in, or the first.
    """
    newcomers = {(admission.step, admission.request): admission for admission in timeline.admissions()}
    chunks, arrivals, decodes = [], [], []
    for index, step in enumerate(timeline.steps):
        num_decodes = sum(share.phase is Phase.DECODE for share in step)
        longest = max(step, key=lambda share: share.num_tokens)
        newcomer = newcomers.get((index, longest.request))
        if num_decodes == len(step):
            decodes.append((num_decodes, index))
        elif num_decodes and longest.num_tokens > 1:
            if newcomer is None:
                chunks.append((num_decodes, index))
            elif newcomer.previous is not None:
                arrivals.append((num_decodes, index))
    found = [_first_best(candidates) for candidates in (chunks, arrivals, decodes) if candidates]
    return sorted(found[:2]) or [0]


def _first_best(candidates: Sequence[tuple[int, int]]) -> int:
    return max(candidates, key=lambda candidate: (candidate[0], -candidate[1]))[1]


def step_story(timeline: Timeline, index: int, jobs: Sequence[Job]) -> str:
    """What a step shows, in a line."""
    step = timeline.steps[index]
    for admission in timeline.admissions():
        if admission.step == index and admission.previous is not None:
            name, previous = jobs[admission.request].label, jobs[admission.previous].label
            return f"{name} gets on where {previous} got off; nobody else waits"
    chunks = [share for share in step if share.phase is Phase.PREFILL]
    if not chunks:
        return "everybody decodes, one token each"
    if len(chunks) == len(step):
        return "prompts only"
    longest = max(chunks, key=lambda share: share.num_tokens)
    return f"{jobs[longest.request].label}'s prompt goes in chunks; decodes ride along"
