"""Requests that have waited too long: dropped before anything is computed for them."""

from __future__ import annotations

from engine.core import MAX_RETRY_AFTER_S
from engine.errors import Overloaded
from engine.messages import Deadlines, Event, Failed, TokensOut
from tests.factories import make_core, make_submit


class Clock:
    """Stands where the test puts it."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def failures(events: tuple[Event, ...]) -> dict[int, Overloaded]:
    return {e.request_id: e.error for e in events if isinstance(e, Failed) and isinstance(e.error, Overloaded)}


def test_who_has_begun_stays_and_who_has_not_goes() -> None:
    clock = Clock()
    core, runner = make_core(clock=clock, max_num_seqs=1)
    for i, start_s in enumerate([105.0, 105.0, 106.0, None]):
        submit = make_submit(i, [5, 6], ignore_eos=True, arrival_s=100.0, deadlines=Deadlines(start_s=start_s))
        core.submit(submit)
    core.step()
    clock.now_s = 104.9
    core.drop_overdue()
    assert not failures(core.step().events)
    clock.now_s = 105.0
    core.drop_overdue()
    report = core.step()
    failed = failures(report.events)
    assert list(failed) == [1]
    assert "waited 5.0 s" in str(failed[1])
    assert failed[1].retry_after_s == 5.0
    assert any(isinstance(event, TokensOut) and event.request_id == 0 for event in report.events)
    clock.now_s = 10_000.0
    core.drop_overdue()
    failed = failures(core.step().events)
    assert list(failed) == [2]
    assert failed[2].retry_after_s == MAX_RETRY_AFTER_S
    assert {row.request_id for plan in runner.plans for row in plan.rows} == {0}
    core.check_integrity()


def test_the_last_one_may_go_and_leaves_nothing_to_do() -> None:
    clock = Clock()
    core, _ = make_core(clock=clock)
    core.submit(make_submit(0, [5], deadlines=Deadlines(start_s=101.0)))
    clock.now_s = 101.0
    core.drop_overdue()
    assert not core.has_work
    assert list(failures(core.flush().events)) == [0]


def test_one_that_was_put_back_has_begun() -> None:
    clock = Clock()
    core, _ = make_core(clock=clock)
    core.submit(make_submit(0, [5], ignore_eos=True, deadlines=Deadlines(start_s=101.0)))
    core.step()
    [request] = core.scheduler.running
    core.scheduler._put_back(request)
    clock.now_s = 200.0
    core.drop_overdue()
    assert core.scheduler.waiting == [request]
