"""Where the forward pass of a decode step spends its time, on the CPU.

Modules and kernels that are called one by one are timed as they are called. Fused layers are one call into C; after
such a call each kind of kernel in it is run once more alone, in the same order over the same weights, so that what
needs timing is not slowed by it. The results of that are thrown away, but the step's keys and values are then wrong:
whatever is decoded while this watches is good for its times only.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from engine.kernels import Kernels
from engine.model.forward import PagedForward
from engine.model.fused import FusedLayers, FusedLinear, FusedPass
from engine.model.runner import ModelRunner

LINEARS, ATTENTION, NORMS = "linear layers", "attention", "norms"


@dataclass(slots=True)
class Times:
    """Seconds by part, of all steps since the last `take`."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count the block's time."""
        started = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """The times so far; they begin anew."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


@contextmanager
def watch_parts(runner: ModelRunner) -> Iterator[Times]:
    """Time the parts of the runner's steps while the block runs."""
    times = Times()
    forward = runner.forward
    if isinstance(forward, PagedForward):
        runner.forward = replace(forward, kernels=_TimedKernels(forward.kernels, times))
    hooks = [hook for module in forward.model.modules() for hook in _hooks(module, times)]
    try:
        yield times
    finally:
        runner.forward = forward
        for hook in hooks:
            hook.remove()


def _hooks(module: nn.Module, times: Times) -> list[Any]:
    if isinstance(module, FusedLayers | FusedPass):
        return [module.register_forward_hook(_Replay(module, times))]
    if isinstance(module, nn.Linear | FusedLinear):
        clock = _ModuleClock(times)
        return [module.register_forward_pre_hook(clock.start), module.register_forward_hook(clock.stop)]
    return []


class _ModuleClock:
    """Times the calls of a linear layer."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._started = 0.0

    def start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def stop(self, *_: Any) -> None:
        self._times.seconds[LINEARS] += time.perf_counter() - self._started


class _Replay:
    """After such a call, while its inputs are there still: each kind of kernel alone."""

    def __init__(self, module: FusedLayers | FusedPass, times: Times) -> None:
        self._decoder = module.decoder
        self._times = times

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        kept = copy.deepcopy(output)  # it may be in a buffer that a replay writes over
        table = self._decoder.table
        for part, kernels in (
            (LINEARS, {table.linear}),
            (ATTENTION, {*table.attention.values(), *table.write_kv.values()}),
            (NORMS, {table.rms_norm}),
        ):
            with self._times.of(part):
                self._decoder.replay(kernels)
        return kept


class _TimedKernels:
    """Kernels, with a clock on those that attend."""

    def __init__(self, kernels: Kernels, times: Times) -> None:
        self._kernels = kernels
        self._times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    @property
    def write_kv(self) -> Callable[..., None]:
        return self._timed(self._kernels.write_kv)

    @property
    def paged_attention(self) -> Callable[..., Tensor]:
        return self._timed(self._kernels.paged_attention)

    def _timed(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self._times.of(ATTENTION):
                return kernel(*args)

        return run
