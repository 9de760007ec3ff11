"""IsolatingRunner: finds out which rows a step fails of, and computes all the others.

    launch, collect of the whole plan -- no fault --> its result, untouched
          | raises
    its halves, one after the other; of a half that raises, its halves; ... down to single rows
          |
    StepResult.failed      rows that fail alone: their requests fail
    StepResult.postponed   rows that read blocks which a failed row of this step was to fill: computed anew later
    ... and all others' results, as if nothing had been

Computing rows once more is sound, since a row's result is a function of its tokens and of keys and values before it:
what an attempt that failed has left in the cache is written over. Halves are computed in plan order, so that a row
still finds what rows before it share with it. Running out of memory is a fault as any other: halves need half as much.

If not one row can be computed, a trial tells whose fault it is: a step of one token, into a block of a failed row. If
that raises too, the fault is the engine's, and goes up: its state can no longer be trusted.

Knows rows and blocks. It does not know requests, the model, or who runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.errors import is_fault
from engine.params import SamplingParams
from engine.plan import PendingStep, PlanRow, Runner, StepPlan, StepResult

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = "there is not enough memory to compute this request"
FAILED = "this request could not be computed; the server's log says more"

_OUT_OF_MEMORY_SIGNS = ("DefaultCPUAllocator", "out of memory", "not enough memory")
"""What torch's RuntimeErrors say of it, where it has no class for them."""


class IsolatingRunner:
    """A runner around another: see the head of this file. One thread; collect a step before the next is launched."""

    def __init__(self, runner: Runner, block_size: int) -> None:
        self.runner = runner
        self._block_size = block_size

    def launch(self, plan: StepPlan) -> PendingStep:
        """See Runner."""
        try:
            pending = self.runner.launch(plan)
        except BaseException as error:
            if not is_fault(error):
                raise
            return _FailedLaunch(self, plan, _note(plan.rows, error))
        return _Launched(self, plan, pending)

    def isolate(self, plan: StepPlan, fault: str) -> StepResult:
        """The result of a plan that has failed by `fault`. Raises what the engine itself fails of."""
        search = _Search(self.runner, self._block_size)
        search.narrow(plan.rows, fault)
        return search.result(plan)


class _Launched:
    """A step that computes."""

    def __init__(self, runner: IsolatingRunner, plan: StepPlan, pending: PendingStep) -> None:
        self._runner = runner
        self._plan = plan
        self._pending = pending

    def collect(self) -> StepResult:
        try:
            return self._pending.collect()
        except BaseException as error:
            if not is_fault(error):
                raise
            fault = _note(self._plan.rows, error)
        del self._pending  # it holds the step's tensors
        return self._runner.isolate(self._plan, fault)


class _FailedLaunch:
    """A step that could not be launched."""

    def __init__(self, runner: IsolatingRunner, plan: StepPlan, fault: str) -> None:
        self._runner = runner
        self._plan = plan
        self._fault = fault

    def collect(self) -> StepResult:
        return self._runner.isolate(self._plan, self._fault)


class _Search:
    """One search for the rows at fault, and what was computed on the way."""

    def __init__(self, runner: Runner, block_size: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._results: list[StepResult] = []
        self._failed: dict[int, str] = {}
        self._postponed: set[int] = set()
        self._missing: set[int] = set()
        """Blocks that a row of this step was to fill, and has not."""

    def narrow(self, rows: Sequence[PlanRow], fault: str) -> None:
        """Compute these rows, which failed together, in halves."""
        if len(rows) == 1:
            [row] = rows
            self._failed[row.request_id] = fault
            self._missing.update(self._blocks_to_fill(row))
            return
        middle = len(rows) // 2
        self._compute(rows[:middle])
        self._compute(rows[middle:])

    def result(self, plan: StepPlan) -> StepResult:
        """What has come of the plan, its rows' results in its order."""
        if not self._results:
            self._try_engine(next(row for row in plan.rows if row.request_id in self._failed))
        return StepResult(
            sampled=tuple(row for result in self._results for row in result.sampled),
            scored=tuple(row for result in self._results for row in result.scored),
            failed=self._failed,
            postponed=frozenset(self._postponed),
            forward_s=sum(result.forward_s for result in self._results),
            sample_s=sum(result.sample_s for result in self._results),
        )

    def _compute(self, rows: Sequence[PlanRow]) -> None:
        rows = [row for row in rows if not self._postpone(row)]
        if not rows:
            return
        try:
            self._results.append(self._runner.launch(StepPlan(tuple(rows))).collect())
            return
        except BaseException as error:
            if not is_fault(error):
                raise
            fault = _note(rows, error, is_part=True)
        self.narrow(rows, fault)  # here, where the error and the tensors in its frames are gone

    def _postpone(self, row: PlanRow) -> bool:
        """Whether the row must wait, since what it reads is missing."""
        if self._missing.isdisjoint(row.block_ids):
            return False
        self._postponed.add(row.request_id)
        self._missing.update(self._blocks_to_fill(row))
        return True

    def _blocks_to_fill(self, row: PlanRow) -> Sequence[int]:
        """The blocks that the row writes to. Whoever else has them in its table reads them."""
        return row.block_ids[row.start // self._block_size : -(-row.end // self._block_size)]

    def _try_engine(self, failed: PlanRow) -> None:
        """Raise if not even one token can be computed."""
        trial = PlanRow(
            request_id=-1,
            token_ids=(0,),
            start=0,
            block_ids=(failed.block_ids[failed.start // self._block_size],),  # nobody counts on what is in it
            sampling=SamplingParams(temperature=0.0),
            context=(0,),
            num_prompt_tokens=1,
        )
        self._runner.launch(StepPlan((trial,))).collect()
        logger.warning("the engine computes: the fault is that of %d requests", len(self._failed))


def _note(rows: Sequence[PlanRow], error: BaseException, *, is_part: bool = False) -> str:
    """Write the fault into the log; what its request is told, should it be one row's."""
    if len(rows) > 1:
        logger.error("a step of %d rows failed: %r", len(rows), error, exc_info=None if is_part else error)
    else:
        logger.error("a step failed in which request %d was alone", rows[0].request_id, exc_info=error)
    is_memory = isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY_SIGNS)
    return OUT_OF_MEMORY if is_memory else FAILED
