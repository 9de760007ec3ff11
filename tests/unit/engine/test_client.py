"""AsyncEngine over the real loop, thread and core, with a fake model that can be held and broken."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from engine.client import AsyncEngine, Chunk
from engine.core import EngineCore
from engine.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError, EngineStopped, RequestError
from engine.grammar.compiler import GrammarCompiler
from engine.loop import EngineLoop
from engine.messages import Deadlines, Finished, StepReport
from engine.params import GrammarSpec, SamplingParams
from engine.plan import StepPlan
from engine.request import FinishReason
from engine.text.tokenizer import Tokenizer
from tests.factories import FakeRunner, LetterTokenizer, expected_output, letters, make_core
from tests.factories_text import byte_level

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7]


class Gate:
    """Holds the engine thread at the start of each step: steps are let through by number, or all once it is open."""

    def __init__(self, runner: FakeRunner) -> None:
        self._launch = runner.launch
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.fault: Exception | None = None

    def let_through(self, count: int) -> None:
        self._permits.release(count)

    def open(self) -> None:
        self._is_open = True
        self._permits.release()

    def launch(self, plan: StepPlan) -> FakeRunner:
        assert self._is_open or self._permits.acquire(timeout=30), "nobody opened the gate"
        if self.fault is not None:
            raise self.fault
        return self._launch(plan)


@asynccontextmanager
async def running(*, is_open: bool = True) -> AsyncIterator[tuple[AsyncEngine, EngineCore, FakeRunner, Gate]]:
    core, runner = make_core()
    gate = Gate(runner)
    runner.launch = gate.launch  # type: ignore[method-assign]
    if is_open:
        gate.open()
    engine = AsyncEngine(lambda: (core, cast(Tokenizer, LetterTokenizer())))
    await engine.load()
    try:
        yield engine, core, runner, gate
    finally:
        gate.open()
        await engine.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread
            await asyncio.sleep(0.001)


async def collect(engine: AsyncEngine, **params: object) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(PROMPT, SamplingParams(**params))]  # type: ignore[arg-type]


async def test_chunks_join_to_the_output():
    async with running() as (engine, *_):
        chunks = await collect(engine, max_tokens=8, ignore_eos=True)
    expected = expected_output(PROMPT, 8, frozenset())
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert "".join(chunk.text for chunk in chunks) == letters(expected)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]


async def test_many_at_once_each_get_their_own():
    async with running() as (engine, core, *_):
        outputs = await asyncio.gather(*(collect(engine, max_tokens=n, ignore_eos=True) for n in range(1, 12)))
        for n, chunks in enumerate(outputs, start=1):
            text = "".join(chunk.text for chunk in chunks)
            assert text == letters(expected_output(PROMPT, n, frozenset()))
        await until(lambda: engine.stats.num_used_blocks == 0)
        core.check_integrity()


async def test_a_stop_string_frees_the_request_and_counts_as_stop():
    text = letters(expected_output(PROMPT, 12, frozenset()))
    reports: list[StepReport] = []
    async with running(is_open=False) as (engine, _, _, gate):
        engine.add_observer(reports.append)
        gate.let_through(6)
        chunks = await collect(engine, max_tokens=12, ignore_eos=True, stop=(text[3:5],))
        gate.open()
        await until(lambda: any(isinstance(e, Finished) for report in reports for e in report.events))
    assert "".join(chunk.text for chunk in chunks) == text[: text.index(text[3:5])]
    assert chunks[-1].stop_reason == text[3:5]
    ends = [e for report in reports for e in report.events if isinstance(e, Finished)]
    assert [end.reason for end in ends] == [FinishReason.STOP]


async def test_closing_the_generator_is_the_abort():
    reports: list[StepReport] = []
    async with running(is_open=False) as (engine, core, _, gate):
        engine.add_observer(reports.append)
        gate.let_through(2)
        generator = engine.generate(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True))
        await anext(generator)
        await generator.aclose()
        gate.open()
        await until(lambda: any(isinstance(e, Finished) for report in reports for e in report.events))
        ends = [e for report in reports for e in report.events if isinstance(e, Finished)]
        assert [end.reason for end in ends] == [FinishReason.ABORT]
        assert (engine.stats.num_running, engine.stats.num_used_blocks) == (0, 0)
        core.check_integrity()


async def test_a_cancelled_reader_aborts_too():
    async with running(is_open=False) as (engine, _, _, gate):
        task = asyncio.create_task(collect(engine, max_tokens=50, ignore_eos=True))
        await until(lambda: engine.stats.num_waiting == 1)
        task.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.stats.num_running == 0 and engine.stats.num_waiting == 0)


def in_ms(milliseconds: float) -> Deadlines:
    return Deadlines(end_s=time.monotonic() + milliseconds / 1000)


async def test_a_request_that_waits_fails_at_its_deadline_and_is_never_computed():
    async with running(is_open=False) as (engine, _, runner, gate):
        other = asyncio.create_task(collect(engine, max_tokens=2, ignore_eos=True))
        await until(lambda: engine.stats.step_started_s is not None)
        with pytest.raises(DeadlineExceeded, match="not complete by"):
            await anext(engine.generate(PROMPT, SamplingParams(), deadlines=in_ms(20)))
        gate.open()
        await other
        assert {row.request_id for plan in runner.plans for row in plan.rows} == {0}


def timers_of(engine: AsyncEngine) -> list[Callable[[], None]]:
    """What the engine's timers call, from now on, to be called by the test: the clock does not matter then."""
    loop = MagicMock(wraps=engine._asyncio_loop)
    timers: list[Callable[[], None]] = []
    loop.call_later.side_effect = lambda _, function: timers.append(function) or MagicMock()
    engine._asyncio_loop = loop
    return timers


async def test_a_deadline_in_decode_comes_after_the_tokens_that_were_taken():
    async with running(is_open=False) as (engine, core, _, gate):
        timers = timers_of(engine)
        generator = engine.generate(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True), deadlines=in_ms(10**7))
        gate.let_through(1)
        first = await anext(generator)
        gate.let_through(1)
        second = await anext(generator)
        timers[0]()
        with pytest.raises(DeadlineExceeded):
            await anext(generator)
        assert [*first.token_ids, *second.token_ids] == expected_output(PROMPT, 2, frozenset())
        gate.open()
        await until(lambda: engine.stats.num_running == 0 and engine.stats.num_used_blocks == 0)
        core.check_integrity()


async def test_at_its_deadline_a_request_is_aborted_though_its_reader_has_stopped():
    async with running(is_open=False) as (engine, _, _, gate):
        timers = timers_of(engine)
        generator = engine.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True), deadlines=in_ms(10**7))
        gate.let_through(1)
        await anext(generator)
        await until(lambda: engine.stats.step_started_s is not None)  # the next one has begun: it is not taken back
        timers[0]()
        gate.let_through(1)
        await until(lambda: engine.stats.num_running == 0 and engine.stats.num_steps == 2)
        await generator.aclose()


async def test_what_has_ended_in_time_is_whole_though_its_reader_is_late():
    async with running(is_open=False) as (engine, _, _, gate):
        timers = timers_of(engine)
        generator = engine.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True), deadlines=in_ms(10**7))
        gate.let_through(1)
        chunks = [await anext(generator)]
        gate.open()
        await until(lambda: engine._streams[0].has_ended)
        timers[0]()
        chunks += [chunk async for chunk in generator]
        assert [token for chunk in chunks for token in chunk.token_ids] == expected_output(PROMPT, 8, frozenset())


async def test_a_deadline_that_has_passed_submits_nothing():
    async with running() as (engine, core, *_):
        with pytest.raises(DeadlineExceeded):
            await anext(engine.generate(PROMPT, SamplingParams(), deadlines=in_ms(-1)))
        assert await collect(engine, max_tokens=1)
        assert core.stats().num_steps == 1


async def test_a_request_that_does_not_fit_is_refused_before_anything_is_queued():
    async with running() as (engine, core, *_):
        with pytest.raises(RequestError, match="context length is 64") as caught:
            engine.generate([1] * 60, SamplingParams(max_tokens=5))
        assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
        with pytest.raises(RequestError, match="token id 50"):
            engine.check([50], SamplingParams())
        with pytest.raises(RequestError, match="empty"):
            engine.check([], SamplingParams())
        assert core.stats().num_steps == 0


async def test_a_failed_row_fails_its_request_alone():
    async with running() as (engine, _, runner, _):
        runner.poisoned.add(0)
        failed, good = await asyncio.gather(
            collect(engine, max_tokens=3), collect(engine, max_tokens=3, ignore_eos=True), return_exceptions=True
        )
        assert isinstance(failed, EngineError)
        assert isinstance(good, list)
        assert engine.dead is None


async def test_a_step_that_raises_fails_everyone_and_says_why(caplog: pytest.LogCaptureFixture):
    async with running() as (engine, _, _, gate):
        told: list[EngineDead] = []
        engine.on_dead(told.append)
        gate.fault = ValueError("broken")
        first, second = await asyncio.gather(collect(engine), collect(engine), return_exceptions=True)
        assert type(first) is EngineDead
        assert type(second) is EngineDead
        assert first is not second
        assert "ValueError: broken" in str(first)
        assert len(told) == 1
        with pytest.raises(EngineDead):
            engine.check(PROMPT, SamplingParams())
    assert "the engine thread died" in caplog.text


async def test_open_requests_end_when_the_engine_is_closed():
    async with running(is_open=False) as (engine, _, _, gate):
        task = asyncio.create_task(collect(engine, max_tokens=50, ignore_eos=True))
        await until(lambda: engine.stats.num_waiting == 1)
        closing = asyncio.create_task(engine.close())
        await until(lambda: not engine._loop._inbox.empty())  # it has been told to stop, in the middle of a step
        gate.open()
        await closing
        with pytest.raises(EngineStopped, match="told to stop"):
            await task
        with pytest.raises(EngineStopped):  # what comes later is told the same
            engine.check(PROMPT, SamplingParams())


async def test_what_fails_to_load_raises_in_start():
    def fail() -> tuple[EngineCore, Tokenizer]:
        raise ConfigError("no such model", setting="model")

    with pytest.raises(ConfigError, match="no such model"):
        await AsyncEngine(fail).load()


class GrammarGate:
    """Holds the grammars' thread until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = threading.Event()
        self.begun = threading.Event()
        self.open = self._is_open.set
        compile_one = GrammarCompiler._compile

        def held(compiler: GrammarCompiler, entry: Any) -> Any:
            self.begun.set()
            assert self._is_open.wait(30), "nobody opened the gate"
            return compile_one(compiler, entry)

        monkeypatch.setattr(GrammarCompiler, "_compile", held)


@asynccontextmanager
async def running_with_grammars() -> AsyncIterator[tuple[AsyncEngine, FakeRunner]]:
    """An engine whose tokenizer is a real one; its fake model knows nothing of masks."""
    core, runner = make_core()
    engine = AsyncEngine(lambda: (core, byte_level()))
    await engine.load()
    try:
        yield engine, runner
    finally:
        await engine.close()


async def test_a_request_is_submitted_with_its_grammar_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch):
    gate = GrammarGate(monkeypatch)
    async with running_with_grammars() as (engine, runner):
        params = SamplingParams(max_tokens=4, grammar=GrammarSpec("regex", "(.|\n)*"))
        waiting = asyncio.create_task(anext(engine.generate(PROMPT, params)))
        await asyncio.to_thread(gate.begun.wait, 30)
        assert [chunk async for chunk in engine.generate(PROMPT, SamplingParams(max_tokens=2))]
        assert not waiting.done()
        assert all(row.mask is None for plan in runner.plans for row in plan.rows)
        gate.open()
        await waiting
        assert runner.plans[-1].rows[-1].mask is not None


async def test_leaving_while_a_grammar_is_compiled_submits_nothing(monkeypatch: pytest.MonkeyPatch):
    gate = GrammarGate(monkeypatch)
    async with running_with_grammars() as (engine, runner):
        params = SamplingParams(max_tokens=2, grammar=GrammarSpec("regex", "(.|\n)*"))
        leaving = asyncio.create_task(anext(engine.generate(PROMPT, params)))
        staying = asyncio.create_task(anext(engine.generate(PROMPT, params)))
        await asyncio.to_thread(gate.begun.wait, 30)
        leaving.cancel()
        await asyncio.wait({leaving})
        gate.open()
        await staying
        assert {row.request_id for plan in runner.plans for row in plan.rows} == {1}


async def test_a_deadline_counts_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch):
    gate = GrammarGate(monkeypatch)
    async with running_with_grammars() as (engine, runner):
        params = SamplingParams(max_tokens=2, grammar=GrammarSpec("regex", "(.|\n)*"))
        staying = asyncio.create_task(anext(engine.generate(PROMPT, params)))
        with pytest.raises(DeadlineExceeded):
            await anext(engine.generate(PROMPT, params, deadlines=in_ms(20)))
        gate.open()
        await staying
        assert {row.request_id for plan in runner.plans for row in plan.rows} == {0}


async def test_a_grammar_that_is_refused_or_fails_is_the_requests_fault():
    async with running_with_grammars() as (engine, runner):
        params = SamplingParams(grammar=GrammarSpec("regex", "(", "response_format"))
        with pytest.raises(RequestError, match="unclosed group") as caught:
            await anext(engine.generate(PROMPT, params))
        assert caught.value.param == "response_format"
        assert runner.plans == []
        params = SamplingParams(grammar=GrammarSpec("regex", "no such token", "response_format"))
        with pytest.raises(RequestError, match="no further"):
            _ = [chunk async for chunk in engine.generate(PROMPT, params)]
        assert [chunk async for chunk in engine.generate(PROMPT, SamplingParams(max_tokens=2))]


async def test_an_engine_that_ends_while_a_grammar_is_compiled_tells_its_request(monkeypatch: pytest.MonkeyPatch):
    gate = GrammarGate(monkeypatch)
    async with running_with_grammars() as (engine, _):
        waiting = asyncio.create_task(anext(engine.generate(PROMPT, SamplingParams(grammar=GrammarSpec("regex", "a")))))
        await asyncio.to_thread(gate.begun.wait, 30)
        await engine.close()
        gate.open()
        with pytest.raises(EngineDead):
            await waiting


async def test_a_turn_begins_with_work_and_ends_with_it():
    async with running(is_open=False) as (engine, _, _, gate):
        assert engine.turn_began_s is None
        task = asyncio.create_task(collect(engine, max_tokens=2, ignore_eos=True))
        await until(lambda: engine.turn_began_s is not None)
        began_s = engine.turn_began_s
        gate.let_through(1)
        await until(lambda: engine.turn_began_s != began_s)
        gate.open()
        await task
        await until(lambda: engine.turn_began_s is None)


async def test_an_engine_that_is_given_up_fails_everyone_and_is_not_waited_for():
    async with running(is_open=False) as (engine, _, _, gate):
        told: list[EngineDead] = []
        engine.on_dead(told.append)
        task = asyncio.create_task(collect(engine))
        await until(lambda: engine.stats.step_started_s is not None)
        engine.give_up(EngineDead("it hangs"))
        with pytest.raises(EngineDead, match="it hangs"):
            await task
        with pytest.raises(EngineDead, match="it hangs"):
            engine.check(PROMPT, SamplingParams())
        await engine.close()  # would take ten seconds
        assert not gate._is_open
        gate.open()
        await until(lambda: not engine._loop._thread.is_alive())
        assert len(told) == 1


async def test_an_observer_that_fails_costs_nobody_a_token(caplog: pytest.LogCaptureFixture):
    def fail(_: StepReport) -> None:
        raise ValueError("cannot count")

    async with running() as (engine, *_):
        engine.add_observer(fail)
        chunks = await collect(engine, max_tokens=8, ignore_eos=True)
    assert [token for chunk in chunks for token in chunk.token_ids] == expected_output(PROMPT, 8, frozenset())
    assert "cannot count" in caplog.text


async def test_a_thread_that_is_gone_without_a_word_is_noticed(monkeypatch: pytest.MonkeyPatch):
    def end_like_a_thread_that_c_code_ends(loop: EngineLoop) -> None:
        loop._make_core()
        loop._on_loaded(None)

    monkeypatch.setattr(EngineLoop, "_run", end_like_a_thread_that_c_code_ends)
    async with running() as (engine, *_):
        await until(lambda: engine.is_lost)
        with pytest.raises(EngineDead, match="its thread is gone"):
            engine.check(PROMPT, SamplingParams())
