"""Static batching, the baseline that continuous batching is measured against: padded waves with a barrier.

    A  --aAAAAA..................    `-`  prompts are padded on the left to the wave's longest one
    B  ----bBBBBBBBBBB...........    `.`  a row that is done stays in the batch: its results are thrown away
    C  cccccCCCCCCCCCCCCCCCCCCCCC    the barrier: nobody else starts before the longest output is done

The model is the plain `transformers` one under its own `generate()`, with its own attention and cache, so that this
is an oracle for the engine's output as well. Greedy, and every output as long as its request says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.model.loader import weight_files
from engine.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAD = 0  # any token will do: padding is masked


@dataclass(frozen=True, slots=True)
class StaticRequest:
    """A prompt, at least one token, and how many tokens to generate for it (end-of-text tokens count as any other)."""

    prompt_token_ids: Sequence[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Wave:
    """One batch: the requests `first ... first + num_rows - 1`, from its padded prompts to its longest output."""

    first: int
    num_rows: int
    padded_prompt_len: int
    num_steps: int
    """Forward passes: the first over the prompts, each of the others over one token a row."""
    started_s: float
    """From the start of the run, as all times here."""
    first_token_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class StaticRun:
    """What came of the requests, in their order, and the waves they went in."""

    outputs: tuple[tuple[int, ...], ...]
    waves: tuple[Wave, ...]

    @property
    def elapsed_s(self) -> float:
        """Seconds for all of it."""
        return self.waves[-1].ended_s


def load_plain_model(path: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model in directory `path` as transformers alone runs it, without generation defaults of its own.

    Those (a repetition penalty, end-of-text tokens) would be filled in for whatever a call leaves open. Raises what
    transformers raises when the model cannot be loaded, and ModelError for weights that are no safetensors.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    weight_files(path)
    with _without_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    return model.eval().to(device)


def generate_in_waves(
    model: PreTrainedModel,
    requests: Sequence[StaticRequest],
    *,
    wave_size: int,
    progress: Progress | None = None,
) -> StaticRun:
    """Generate for at least one request, `wave_size` at a time, in order. `model` is one of `load_plain_model`."""
    started_s = time.perf_counter()
    outputs: list[tuple[int, ...]] = []
    waves: list[Wave] = []
    num_steps = sum(_longest(requests[i : i + wave_size]) for i in range(0, len(requests), wave_size))
    clock = _StepClock(started_s, num_steps, progress)
    for first in range(0, len(requests), wave_size):
        members = requests[first : first + wave_size]
        wave_started_s, first_step = clock.now_s(), len(clock.step_ends_s)
        outputs += _generate_wave(model, members, clock)
        waves.append(
            Wave(
                first=first,
                num_rows=len(members),
                padded_prompt_len=max(len(request.prompt_token_ids) for request in members),
                num_steps=_longest(members),
                started_s=wave_started_s,
                first_token_s=clock.step_ends_s[first_step],
                ended_s=clock.now_s(),
            )
        )
    return StaticRun(tuple(outputs), tuple(waves))


def _longest(requests: Sequence[StaticRequest]) -> int:
    return max(request.num_output_tokens for request in requests)


def _generate_wave(
    model: PreTrainedModel, members: Sequence[StaticRequest], clock: _StepClock
) -> list[tuple[int, ...]]:
    """One padded batch through `generate()`, cut to what each request asked for."""
    from transformers import StoppingCriteriaList

    padded_len = max(len(request.prompt_token_ids) for request in members)
    token_ids = torch.full((len(members), padded_len), PAD)
    mask = torch.zeros_like(token_ids)
    for row, request in enumerate(members):
        start = padded_len - len(request.prompt_token_ids)
        token_ids[row, start:] = torch.tensor(request.prompt_token_ids)
        mask[row, start:] = 1
    generated = model.generate(
        token_ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=_longest(members),
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
    )[:, padded_len:].tolist()
    return [tuple(row[: request.num_output_tokens]) for row, request in zip(generated, members, strict=True)]


class _StepClock:
    """A stopping criterion that never stops: `generate()` calls it after each step, and it looks at the clock."""

    def __init__(self, started_s: float, num_steps: int, progress: Progress | None) -> None:
        self.step_ends_s: list[float] = []
        self._started_s = started_s
        self._num_steps = num_steps
        self._progress = progress

    def now_s(self) -> float:
        return time.perf_counter() - self._started_s

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.step_ends_s.append(self.now_s())
        if self._progress is not None:
            self._progress("static batching", len(self.step_ends_s) / self._num_steps)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
