"""Requests with a grammar on their way through core and scheduler. The grammar is a fake that watches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from engine.core import EngineCore
from engine.errors import RequestError
from engine.messages import Event, Failed, Finished, Submit, TokensOut
from engine.params import MAX_GRAMMAR_LEN, GrammarSpec
from engine.request import FinishReason
from tests.factories import EOS, expected_output, make_core, make_submit

SPEC = GrammarSpec("regex", "x", "response_format")


@dataclass
class FakeConstraint:
    """Is finished after so many tokens, or fails at one."""

    length: int | None = None
    fails_at: int | None = None
    accepted: list[int] = field(default_factory=list)
    error: str | None = None

    def mask(self) -> bytes:
        return bytes(7)

    def accept(self, token_id: int) -> bool:
        assert self.error is None
        self.accepted.append(token_id)
        if len(self.accepted) == self.fails_at:
            self.error = "it is too complex"
        return self.error is None

    @property
    def is_finished(self) -> bool:
        return len(self.accepted) == self.length

    def start(self) -> FakeConstraint:
        """It is its own grammar."""
        return self


def constrained(constraint: FakeConstraint, request_id: int, prompt: Sequence[int], **fields: object) -> Submit:
    return replace(make_submit(request_id, prompt, grammar=SPEC, **fields), grammar=constraint)


def run(core: EngineCore) -> list[Event]:
    events: list[Event] = []
    while core.has_work:
        events.extend(core.step().events)
        core.check_integrity()
    return events


def tokens_of(events: Sequence[Event], request_id: int) -> list[int]:
    return [event.token_ids[0] for event in events if isinstance(event, TokensOut) and event.request_id == request_id]


def end_of(events: Sequence[Event], request_id: int) -> Finished | Failed:
    (end,) = [e for e in events if not isinstance(e, TokensOut) and e.request_id == request_id]
    return end


def test_only_sampled_rows_carry_the_mask() -> None:
    core, runner = make_core(max_num_batched_tokens=4)
    constraint = FakeConstraint()
    core.submit(constrained(constraint, 0, [1] * 6, max_tokens=2, ignore_eos=True))
    run(core)
    assert [row.mask is not None for plan in runner.plans for row in plan.rows] == [False, True, True]
    assert constraint.accepted == expected_output([1] * 6, 2, frozenset())


def test_a_finished_grammar_ends_the_output_at_once() -> None:
    core, _ = make_core()
    core.submit(constrained(FakeConstraint(length=3), 0, [1, 2], max_tokens=3, min_tokens=3))
    events = run(core)
    assert tokens_of(events, 0) == expected_output([1, 2], 3, frozenset())
    end = end_of(events, 0)
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, None)


def test_the_end_of_text_ends_it_whatever_ignore_eos_says() -> None:
    prompt = next([1, i] for i in range(50) if EOS in expected_output([1, i], 12, frozenset()))
    core, _ = make_core()
    constraint = FakeConstraint()
    core.submit(constrained(constraint, 0, prompt, max_tokens=20, ignore_eos=True))
    end = end_of(run(core), 0)
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, EOS)
    assert constraint.accepted[-1] == EOS


def test_a_grammar_that_fails_fails_its_request_alone() -> None:
    core, _ = make_core()
    core.submit(constrained(FakeConstraint(fails_at=2), 0, [1, 2], max_tokens=9, ignore_eos=True))
    core.submit(make_submit(1, [3, 4], max_tokens=5, ignore_eos=True))
    events = run(core)
    assert len(tokens_of(events, 0)) == 1
    end = end_of(events, 0)
    assert isinstance(end, Failed)
    assert isinstance(end.error, RequestError)
    assert end.error.param == "response_format"
    assert "it is too complex" in str(end.error)
    assert tokens_of(events, 1) == expected_output([3, 4], 5, frozenset())


def test_a_row_without_a_token_to_choose_says_so() -> None:
    core, runner = make_core()
    runner.poisoned.add(0)
    core.submit(constrained(FakeConstraint(), 0, [1, 2]))
    end = end_of(run(core), 0)
    assert isinstance(end, Failed)
    assert "no token is left" in str(end.error)


def test_recomputing_after_a_preemption_asks_the_grammar_nothing() -> None:
    core, _ = make_core(num_blocks=6, block_size=2, prefix_caching=False, max_num_seqs=3)
    constraints = [FakeConstraint() for _ in range(3)]
    for i, constraint in enumerate(constraints):
        core.submit(constrained(constraint, i, [i + 1, 2], max_tokens=8, ignore_eos=True))
    num_preempted = 0
    while core.has_work:
        report = core.step()
        assert report.stats is not None
        num_preempted += report.stats.num_preempted
    assert num_preempted > 0
    for i, constraint in enumerate(constraints):
        expected = expected_output([i + 1, 2], 8, frozenset({EOS}))
        assert constraint.accepted == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GrammarSpec("regex", "", "f"), "f must be text that is not empty"),
        (lambda: GrammarSpec("lark", "x" * (MAX_GRAMMAR_LEN + 1), "f"), "f must be at most 131072 characters"),
        (lambda: GrammarSpec("regex", "\ud800", "f"), "f must be Unicode text"),
        (lambda: GrammarSpec.choice([], param="f"), "f must be a choice of at least one"),
    ],
)
def test_what_is_no_grammar_at_all_is_refused_at_once(make: object, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        make()  # type: ignore[operator]
    assert caught.value.param == "f"
