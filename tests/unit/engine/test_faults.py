"""Faults made on purpose: how they are written, and that each strikes in its phase, at its pass and nowhere else."""

from __future__ import annotations

from typing import Any, cast

import pytest

from engine.core import EngineCore
from engine.errors import ConfigError
from engine.faults import Fault, InjectedFault, install, observers
from engine.isolation import IsolatingRunner
from engine.messages import Failed, StepReport, TokensOut
from engine.plan import StepResult
from engine.text.tokenizer import Tokenizer
from tests.factories import FakeRunner, LetterTokenizer, make_core, make_submit


def strikes(fault: Fault, num_passes: int) -> list[int]:
    struck = []
    for i in range(1, num_passes + 1):
        try:
            fault.strike()
        except (InjectedFault, MemoryError):
            struck.append(i)
    return struck


@pytest.mark.parametrize(
    ("text", "struck"),
    [
        ("launch:raise", [1]),
        ("launch:oom@3", [3]),
        ("sample:raise@2x3", [2, 3, 4]),
        ("sample:raise@4x0", [4, 5, 6]),
    ],
)
def test_at_which_passes_it_strikes(text: str, struck: list[int]) -> None:
    assert strikes(Fault.parse(text), 6) == struck


def test_slow_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr("engine.faults.time.sleep", slept_s.append)
    fault = Fault.parse("tokenize:slow=0.05@2")
    fault.strike()
    assert slept_s == []
    fault.strike()
    assert slept_s == [0.05]


@pytest.mark.parametrize("text", ["", "launch", "nowhere:raise", "launch:explode", "launch:raise@x", "sample:raise?4"])
def test_what_is_no_fault_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ConfigError, match="is no fault") as caught:
        Fault.parse(text)
    assert caught.value.setting == "faults"
    assert "PHASE:KIND" in str(caught.value.hint)


class Sampler:
    def sample(self, rows: int) -> int:
        return rows


class SamplingRunner(FakeRunner):
    """Has a sampler, as the real one."""

    sampler = Sampler()

    def collect(self) -> StepResult:
        self.sampler.sample(1)
        return super().collect()


def make_faulty(*faults: str) -> tuple[EngineCore, Tokenizer]:
    """A core whose parts have these faults."""
    core, fake = make_core()
    runner = SamplingRunner(fake.block_size, fake.num_blocks)
    runner.sampler = Sampler()
    tokenizer = LetterTokenizer()
    tokenizer.encode = tokenizer.render_chat = lambda text: [ord(each) for each in text]  # type: ignore[attr-defined]
    install(
        faults,
        scheduler=core.scheduler,
        runner=runner,
        sampler=runner.sampler,
        tokenizer=cast(Tokenizer, tokenizer),
    )
    core.runner = IsolatingRunner(runner, fake.block_size)
    return core, cast(Tokenizer, tokenizer)


def drain(core: EngineCore) -> dict[int, list[Any]]:
    """Each request's tokens, and last its error if it has one."""
    told: dict[int, list[Any]] = {}
    while core.has_work:
        for event in core.step().events:
            if isinstance(event, TokensOut):
                told.setdefault(event.request_id, []).extend(event.token_ids)
            elif isinstance(event, Failed):
                told.setdefault(event.request_id, []).append(event.error)
        core.check_integrity()
    return told


def submit(core: EngineCore, *prompts: list[int]) -> None:
    for request_id, prompt in enumerate(prompts):
        core.submit(make_submit(request_id, prompt, max_tokens=3, ignore_eos=True, arrival_s=float(request_id)))


@pytest.mark.parametrize("phase", ["launch", "collect", "sample"])
@pytest.mark.parametrize("kind", ["raise", "oom"])
def test_a_fault_of_one_step_fails_nobody_who_is_not_alone(phase: str, kind: str) -> None:
    core, _ = make_faulty(f"{phase}:{kind}@2")
    submit(core, [5, 6], [7, 8], [9])
    good, _ = make_faulty()
    submit(good, [5, 6], [7, 8], [9])
    assert drain(core) == drain(good)


@pytest.mark.parametrize("phase", ["launch", "collect"])
def test_a_fault_of_one_prompt_fails_that_request_alone(phase: str) -> None:
    core, _ = make_faulty(f"{phase}:oom@1x0?7")
    submit(core, [5, 6], [7, 8], [9])
    told = drain(core)
    assert [type(each[-1]).__name__ for each in told.values()].count("EngineError") == 1
    assert "not enough memory" in str(told[1][-1])
    assert [len(told[0]), len(told[2])] == [3, 3]


@pytest.mark.parametrize("text", ["schedule:raise", "launch:raise@1x0", "collect:oom@1x0", "sample:raise@1x0"])
def test_what_nobody_is_at_fault_of_goes_up(text: str) -> None:
    core, _ = make_faulty(text)
    submit(core, [5, 6], [7, 8])
    with pytest.raises((InjectedFault, MemoryError)):
        drain(core)


def test_faults_of_texts() -> None:
    _, tokenizer = make_faulty("tokenize:raise@2", "template:raise", "detokenize:raise@3")
    assert tokenizer.encode("a") == [97]
    with pytest.raises(InjectedFault):
        tokenizer.encode("a")
    with pytest.raises(InjectedFault):
        tokenizer.render_chat("a")  # type: ignore[arg-type]
    assert tokenizer.pieces is not None
    assert [tokenizer.pieces[0], tokenizer.pieces[1]] == [b"A", b"B"]
    with pytest.raises(InjectedFault):
        tokenizer.pieces[0]
    assert tokenizer.pieces.errors == "replace"


class Anything:
    """A grammar that lets everything through."""

    is_finished = False
    error = None

    def start(self) -> Anything:
        return self

    def mask(self) -> bytes:
        return b"\xff" * 7

    def accept(self, _: int) -> bool:
        return True


def test_a_fault_of_a_grammar_fails_its_request_alone() -> None:
    from dataclasses import replace

    from engine.params import GrammarSpec

    core, _ = make_faulty("grammar:raise@2")
    submit(core, [5, 6])
    params = {"max_tokens": 3, "grammar": GrammarSpec("regex", "x", "response_format")}
    core.submit(replace(make_submit(1, [7, 8], **params), grammar=Anything()))
    told = drain(core)
    assert len(told[0]) == 3
    assert "response_format can guide the output no further" in str(told[1][-1])
    assert len(told[1]) == 2


def test_a_grammar_that_cannot_begin_fails_its_request_alone() -> None:
    from dataclasses import replace

    class Broken(Anything):
        def start(self) -> Anything:
            raise ValueError("broken")

    core, _ = make_faulty()
    core.submit(replace(make_submit(0, [7, 8]), grammar=Broken()))
    [failed] = core.flush().events
    assert isinstance(failed, Failed)
    assert "could not be begun" in str(failed.error)
    submit(core, [5, 6])
    assert len(drain(core)[0]) == 3


def test_a_fault_of_the_delivery_is_an_observer() -> None:
    [observer] = observers(["launch:raise", "deliver:raise@2"])
    observer(StepReport(()))
    with pytest.raises(InjectedFault):
        observer(StepReport(()))


def test_without_faults_nothing_is_touched() -> None:
    core, fake = make_core()
    before = dict(vars(core.scheduler))
    install((), scheduler=core.scheduler, runner=fake, sampler=None, tokenizer=cast(Tokenizer, LetterTokenizer()))
    assert vars(core.scheduler) == before
    assert "launch" not in vars(fake)
