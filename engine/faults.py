"""Faults made on purpose, so that tests see what becomes of them. Nothing is installed unless a setting asks for it.

    PHASE:KIND[=SECONDS][@FIRST[xTIMES]][?TOKEN]

    launch:raise@3          the third step raises at its launch
    collect:hang@5          the fifth step never ends
    launch:oom@2x0?42       from the second on (0: without end), each step with a row whose prompt begins with token 42
                            runs out of memory; other steps are not counted
    tokenize:slow=0.5@1x10  each of the first ten prompts takes half a second more

Phases: `schedule`, `launch`, `collect` and `sample` of a step; `deliver`, of its report, on the event loop; `tokenize`,
`template` and `detokenize` (each token's text) of a request; `grammar`, of each of its tokens. A fault is a wrapper
that stands around the one method of the part where its phase happens (`install`); the parts know nothing of it.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.messages import StepReport
from engine.plan import PendingStep, StepPlan
from engine.request import Request

if TYPE_CHECKING:
    from engine.scheduler import Scheduler
    from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PHASES = ("schedule", "launch", "collect", "sample", "deliver", "tokenize", "template", "detokenize", "grammar")
KINDS = ("raise", "oom", "hang", "slow")

_SPEC = re.compile(
    rf"(?P<phase>{'|'.join(PHASES)}):(?P<kind>{'|'.join(KINDS)})(?:=(?P<seconds>\d+(?:\.\d+)?))?"
    r"(?:@(?P<first>\d+)(?:x(?P<times>\d+))?)?(?:\?(?P<token>\d+))?"
)


class InjectedFault(Exception):
    """What a fault of the kind `raise` raises."""


@dataclass(slots=True)
class Fault:
    """One fault, and how often its phase has been passed. One thread only."""

    phase: str
    kind: str
    seconds: float = 0.0
    """How long `slow` takes."""
    first: int = 1
    """The pass, counted from 1, at which it begins."""
    times: int = 1
    """In how many passes it happens; 0: in all from then on."""
    token: int | None = None
    """Only steps with a row whose prompt begins with this token are passes."""
    num_passed: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Raises ConfigError for what is none; see the head of this file."""
        match = _SPEC.fullmatch(text)
        if match is None or (match["token"] and match["phase"] not in ("launch", "collect")):
            raise ConfigError(
                f"{text!r} is no fault",
                setting="faults",
                hint=f"write PHASE:KIND[=SECONDS][@FIRST[xTIMES]][?TOKEN]; phases: {', '.join(PHASES)}; "
                f"kinds: {', '.join(KINDS)}; ?TOKEN for launch and collect only",
            )
        return cls(
            phase=match["phase"],
            kind=match["kind"],
            seconds=float(match["seconds"] or 0),
            first=int(match["first"] or 1),
            times=int(match["times"] or 1),
            token=None if match["token"] is None else int(match["token"]),
        )

    def strike(self, *_: object) -> None:
        """Pass once: do what the fault does, if it is its turn."""
        self.num_passed += 1
        nth = self.num_passed - self.first
        if nth < 0 or (self.times and nth >= self.times):
            return
        if self.kind == "raise":
            raise InjectedFault(f"made on purpose in {self.phase}, pass {self.num_passed}")
        if self.kind == "oom":
            raise MemoryError(f"DefaultCPUAllocator: made on purpose in {self.phase}, pass {self.num_passed}")
        if self.kind == "hang":
            threading.Event().wait()
        time.sleep(self.seconds)

    def strike_step(self, plan: StepPlan) -> None:
        """Pass with this step, if it has the token."""
        if self.token is None or any(row.context and row.context[0] == self.token for row in plan.rows):
            self.strike()


def install(faults: Sequence[str], *, scheduler: Scheduler, runner: Any, sampler: Any, tokenizer: Tokenizer) -> None:
    """Put `faults` around the parts of an engine that is being built. Raises ConfigError for what is no fault.

    `runner` is the one that computes, within the one that isolates.
    """
    for fault in map(Fault.parse, faults):
        logger.warning("faults are made on purpose in %s", fault.phase)
        match fault.phase:
            case "schedule":
                _strike_before(scheduler, "schedule", fault.strike)
            case "launch":
                _strike_before(runner, "launch", fault.strike_step)
            case "collect":
                runner.launch = _collecting(runner.launch, fault)
            case "sample":
                _strike_before(sampler, "sample", fault.strike)
            case "tokenize":
                _strike_before(tokenizer, "encode", fault.strike)
            case "template":
                _strike_before(tokenizer, "render_chat", fault.strike)
            case "detokenize":
                tokenizer.pieces = _FaultyPieces(tokenizer.pieces, fault)  # type: ignore[assignment]
            case "grammar":
                scheduler.add = _adding(scheduler.add, fault)  # type: ignore[method-assign,assignment]


def observers(faults: Sequence[str]) -> list[Callable[[StepReport], None]]:
    """The faults in `deliver`, to be added to the engine's observers."""
    return [fault.strike for fault in map(Fault.parse, faults) if fault.phase == "deliver"]


def _strike_before(part: Any, method: str, strike: Callable[..., None]) -> None:
    call = getattr(part, method)

    def striking(*args: Any, **kwargs: Any) -> Any:
        strike(*args)
        return call(*args, **kwargs)

    setattr(part, method, striking)


def _collecting(launch: Callable[[StepPlan], PendingStep], fault: Fault) -> Callable[[StepPlan], PendingStep]:
    return lambda plan: _FaultyStep(launch(plan), plan, fault)


class _FaultyStep:
    def __init__(self, pending: PendingStep, plan: StepPlan, fault: Fault) -> None:
        self._pending = pending
        self._plan = plan
        self._fault = fault

    def collect(self) -> Any:
        self._fault.strike_step(self._plan)
        return self._pending.collect()


class _FaultyPieces:
    """The bytes of tokens, and a pass for each that is asked for."""

    def __init__(self, pieces: Any, fault: Fault) -> None:
        self._pieces = pieces
        self._fault = fault

    def __getitem__(self, token_id: int) -> bytes:
        self._fault.strike()
        piece: bytes = self._pieces[token_id]
        return piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pieces, name)


def _adding(add: Callable[[Request], None], fault: Fault) -> Callable[[Request], None]:
    def adding(request: Request) -> None:
        if request.constraint is not None:
            request.constraint = _FaultyConstraint(request.constraint, fault)
        add(request)

    return adding


class _FaultyConstraint:
    """A constraint, and a pass for each token that it is told of."""

    def __init__(self, constraint: Any, fault: Fault) -> None:
        self._constraint = constraint
        self._fault = fault

    def accept(self, token_id: int) -> bool:
        self._fault.strike()
        accepted: bool = self._constraint.accept(token_id)
        return accepted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._constraint, name)
