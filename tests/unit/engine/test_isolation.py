"""IsolatingRunner over fakes: who fails, who is computed anyway, who has to wait; by exact plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest

from engine.isolation import FAILED, OUT_OF_MEMORY, IsolatingRunner
from engine.messages import Failed, Finished, StepReport, TokensOut
from engine.params import SamplingParams
from engine.plan import PlanRow, SampledRow, StepPlan, StepResult
from tests.factories import expected_output, make_core, make_submit

BLOCK_SIZE = 4


def row(request_id: int, block_ids: Sequence[int] | None = None, start: int = 0, num_tokens: int = 1) -> PlanRow:
    blocks = [request_id] if block_ids is None else block_ids
    return PlanRow(request_id, [7] * num_tokens, start, blocks, SamplingParams(temperature=0.0))


class Runner:
    """Notes the rows of each attempt; raises where it is told to."""

    def __init__(self, fault: Callable[[list[int]], BaseException | None], *, in_collect: bool = False) -> None:
        self.attempts: list[list[int]] = []
        self._fault = fault
        self._in_collect = in_collect

    def launch(self, plan: StepPlan) -> Runner:
        self.attempts.append([each.request_id for each in plan.rows])
        if not self._in_collect:
            self._raise()
        return self

    def collect(self) -> StepResult:
        if self._in_collect:
            self._raise()
        return StepResult(tuple(SampledRow(i, 100 + i) for i in self.attempts[-1]), forward_s=1.0)

    def _raise(self) -> None:
        if (error := self._fault(self.attempts[-1])) is not None:
            raise error


def whenever(*bad: int, error: BaseException | None = None) -> Callable[[list[int]], BaseException | None]:
    """A fault of these rows."""
    return lambda ids: (error or ValueError("bad row")) if not set(bad).isdisjoint(ids) else None


def run(runner: Runner, *rows: PlanRow) -> StepResult:
    return IsolatingRunner(runner, BLOCK_SIZE).launch(StepPlan(rows)).collect()


def test_a_step_without_a_fault_is_passed_on() -> None:
    runner = Runner(lambda _: None)
    result = run(runner, row(0), row(1))
    assert runner.attempts == [[0, 1]]
    assert [each.token_id for each in result.sampled] == [100, 101]
    assert (result.failed, result.postponed) == ({}, frozenset())


@pytest.mark.parametrize("in_collect", [False, True])
def test_one_bad_row_is_found_by_halves_and_the_others_are_computed(in_collect: bool) -> None:
    runner = Runner(whenever(5), in_collect=in_collect)
    result = run(runner, *map(row, range(8)))
    assert runner.attempts == [[*range(8)], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [4], [5], [6, 7]]
    assert result.failed == {5: FAILED}
    assert [each.request_id for each in result.sampled] == [0, 1, 2, 3, 4, 6, 7]  # in plan order
    assert result.forward_s == 3.0


def test_a_fault_that_does_not_come_back_fails_nobody() -> None:
    faults = iter([RuntimeError("once")])
    result = run(Runner(lambda _: next(faults, None)), row(0), row(1), row(2))
    assert len(result.sampled) == 3
    assert result.failed == {}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_too_little_memory_for_all_is_enough_for_halves(error: Exception) -> None:
    runner = Runner(lambda ids: error if len(ids) > 2 or 3 in ids else None)
    result = run(runner, *map(row, range(5)))
    assert result.failed == {3: OUT_OF_MEMORY}
    assert [each.request_id for each in result.sampled] == [0, 1, 2, 4]


def test_rows_that_read_what_a_failed_row_was_to_write_wait() -> None:
    """1 was to fill blocks 10 and 11 of [9, 10, 11]; 2 shares 10; 3 shares only 9, which was there before; 4 shares
    what 2 was to fill."""
    runner = Runner(whenever(1))
    rows = (
        row(0),
        row(1, [9, 10, 11], start=4, num_tokens=6),
        row(2, [9, 10, 12], start=8),
        row(3, [9, 13], start=4),
        row(4, [9, 10, 12, 14], start=12),
    )
    result = run(runner, *rows)
    assert result.failed == {1: FAILED}
    assert result.postponed == {2, 4}
    assert [each.request_id for each in result.sampled] == [0, 3]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_if_nothing_can_be_computed_the_engine_is_at_fault(num_rows: int) -> None:
    with pytest.raises(RuntimeError, match="device lost"):
        run(Runner(lambda _: RuntimeError("device lost")), *map(row, range(num_rows)))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_if_no_row_can_be_computed_but_a_token_can_the_rows_are_at_fault(num_rows: int) -> None:
    runner = Runner(whenever(0, 1, 2))
    result = run(runner, *map(row, range(num_rows)))
    assert set(result.failed) == set(range(num_rows))
    assert result.sampled == ()
    assert runner.attempts[-1] == [-1]


def test_the_trial_writes_where_nobody_counts_on() -> None:
    plans: list[StepPlan] = []

    class Keeping(Runner):
        def launch(self, plan: StepPlan) -> Runner:
            plans.append(plan)
            return super().launch(plan)

    run(Keeping(whenever(0)), row(0, [3, 4, 5], start=6, num_tokens=5))
    [trial] = plans[-1].rows
    assert (trial.start, list(trial.block_ids), trial.end) == (0, [4], 1)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit()])
def test_what_ends_the_program_goes_through(end: BaseException) -> None:
    with pytest.raises(type(end)):
        run(Runner(whenever(0, error=end)), row(0), row(1))


def test_a_panic_in_rust_is_a_fault_like_others() -> None:
    panic = type("PanicException", (BaseException,), {})
    assert run(Runner(whenever(0, error=panic("oh"))), row(0), row(1)).failed == {0: FAILED}


def test_the_log_says_what_the_client_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        result = run(Runner(whenever(1, error=ValueError("a secret"))), row(0), row(1))
    assert "a secret" not in result.failed[1]
    assert "a secret" in caplog.text
    assert "request 1 was alone" in caplog.text


def take(report: StepReport, got: dict[int, list[int]], ends: dict[int, object]) -> None:
    for event in report.events:
        if isinstance(event, TokensOut):
            got.setdefault(event.request_id, []).extend(event.token_ids)
        else:
            assert isinstance(event, Failed | Finished)
            assert event.request_id not in ends
            ends[event.request_id] = event


def test_sharers_of_a_prompt_are_computed_anew_when_its_first_reader_fails() -> None:
    """Request 0 computes the prompt that 1 and 2 share in the same step. It fails; they get what they would alone."""
    core, runner = make_core()
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    for request_id in range(3):
        core.submit(make_submit(request_id, prompt, max_tokens=4, ignore_eos=True, arrival_s=float(request_id)))
    runner.broken.add(0)
    got: dict[int, list[int]] = {}
    ends: dict[int, object] = {}
    while core.has_work:
        take(core.step(), got, ends)
        core.check_integrity()
    assert isinstance(ends[0], Failed)
    expected = expected_output(prompt, 4, frozenset())
    assert got == {1: expected, 2: expected}
    assert core.stats().num_used_blocks == 0
