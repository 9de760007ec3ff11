"""The watchdog's judgement, over a fake engine and without its thread: each look says how much time has passed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from config.schema import EngineConfig, SchedulerConfig, ServerConfig, Settings
from engine.errors import EngineDead
from server.watchdog import Watchdog
from tests.factories_engine import FakeEngine

pytestmark = pytest.mark.anyio


class Watch(Watchdog):
    """Looks when it is told to."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine, stall_s=10.0, grace_s=5.0)
        self._loop = asyncio.get_running_loop()
        self._loop_answered = True

    async def look(self, times: int, passed_s: float = 1.0) -> str | None:
        """Look so many times, and let the event loop answer in between."""
        for _ in range(times):
            self._look(passed_s)
            await asyncio.sleep(0)
        return self.problem

    def look_without_the_loop(self, times: int) -> str | None:
        for _ in range(times):
            self._look(1.0)
        return self.problem


async def test_a_step_that_does_not_end_is_a_hang_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    watch = Watch(engine)
    engine.turn_began_s = 100.0
    assert await watch.look(10) is None
    problem = await watch.look(2)
    assert problem is not None
    assert "the engine hangs" in problem
    assert await watch.look(5) == problem
    assert caplog.text.count("the stacks of all threads follow") == 1  # each hang once, however long
    engine.turn_began_s = 200.0  # the next turn
    assert await watch.look(1) is None
    assert "goes on again" in caplog.text


async def test_idle_and_steps_that_end_are_healthy_for_ever() -> None:
    engine = FakeEngine()
    watch = Watch(engine)
    assert await watch.look(1000) is None
    for turn in range(100):
        engine.turn_began_s = float(turn)
        assert await watch.look(9) is None


async def test_a_process_that_was_stopped_or_a_machine_that_slept_has_not_hung() -> None:
    """`_run` counts a look for two intervals at most, so no clock decides; here: the engine's times go backwards."""
    engine = FakeEngine()
    watch = Watch(engine)
    for began_s in (1e9, 5.0, -3.0):
        engine.turn_began_s = began_s
        assert await watch.look(9) is None


async def test_an_event_loop_that_does_not_answer_is_a_hang() -> None:
    watch = Watch(FakeEngine())
    assert await watch.look(100) is None
    assert watch.look_without_the_loop(9) is None
    problem = watch.look_without_the_loop(3)
    assert problem is not None
    assert "the event loop hangs" in problem
    assert await watch.look(3) is None


async def test_an_engine_that_has_ended_is_told_at_once() -> None:
    engine = FakeEngine()
    watch = Watch(engine)
    engine.dead = EngineDead("the engine died: ValueError: broken")
    assert watch.problem == "the engine has ended: the engine died: ValueError: broken"
    engine.dead, engine.is_lost = None, True
    assert await watch.look(1) == "the engine thread has ended without a word"


def settings(**scheduler: object) -> Settings:
    engine = replace(EngineConfig(), scheduler=SchedulerConfig(**scheduler))  # type: ignore[arg-type]
    return Settings(engine=engine, server=ServerConfig(stall_timeout=7))


@pytest.mark.parametrize(
    ("given", "stall_s"),
    [
        (settings(max_num_batched_tokens=10), 7.0),
        (settings(max_num_batched_tokens=10, enable_chunked_prefill=False), 70.0),
        (settings(max_num_batched_tokens=1000, enable_chunked_prefill=False), 7.0),
    ],
)
async def test_a_step_with_a_whole_prompt_in_it_may_take_longer(given: Settings, stall_s: float) -> None:
    assert Watchdog.of(given, FakeEngine(max_model_len=100))._stall_s == stall_s


async def test_its_thread_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[object] = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *arguments, **_: armed.append(arguments))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", armed.clear)
    hung: list[EngineDead] = []
    watch = Watchdog(FakeEngine(), stall_s=0.2, grace_s=0.1)
    watch.start(hung.append)
    async with asyncio.timeout(10):
        while not armed:  # noqa: ASYNC110 - what is waited for happens in another thread
            await asyncio.sleep(0.001)
    watch.stop()
    assert not watch._thread.is_alive()
    assert armed == []
    assert hung == []
