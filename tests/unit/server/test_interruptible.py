"""Work that is ended, and work that is not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import NoReturn

import anyio
import pytest

from server.interruptible import Interrupted, run_interruptible

pytestmark = pytest.mark.anyio

LONG_S = 30.0


@pytest.fixture
def limiter() -> anyio.CapacityLimiter:
    return anyio.CapacityLimiter(1)


class Endless:
    """A loop that catches what it can, and says when it begins and how it ended."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.by: type[BaseException] | None = None

    def __call__(self) -> NoReturn:
        self.begun.set()
        try:
            while True:
                try:
                    while True:
                        pass
                except Exception:
                    pass
        except BaseException as error:
            self.by = type(error)
            raise
        finally:
            self.ended.set()


async def test_the_result_and_the_error_are_the_works_own(limiter: anyio.CapacityLimiter) -> None:
    here = threading.get_ident()
    assert await run_interruptible(threading.get_ident, timeout_s=LONG_S, limiter=limiter) != here
    with pytest.raises(ZeroDivisionError):
        await run_interruptible(lambda: 1 // 0, timeout_s=LONG_S, limiter=limiter)


async def test_what_takes_too_long_is_interrupted(limiter: anyio.CapacityLimiter) -> None:
    work = Endless()
    with pytest.raises(TimeoutError):
        await run_interruptible(work, timeout_s=0.1, limiter=limiter)
    assert await asyncio.to_thread(work.ended.wait, LONG_S)
    assert work.by is Interrupted


async def test_what_nobody_waits_for_any_more_is_interrupted(limiter: anyio.CapacityLimiter) -> None:
    work = Endless()
    task = asyncio.create_task(run_interruptible(work, timeout_s=LONG_S, limiter=limiter))
    assert await asyncio.to_thread(work.begun.wait, LONG_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(work.ended.wait, LONG_S)


async def test_what_is_stuck_in_c_keeps_nobody_waiting(limiter: anyio.CapacityLimiter) -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError):
        await run_interruptible(lambda: release.wait(LONG_S), timeout_s=0.05, limiter=limiter)
    assert await run_interruptible(lambda: 5, timeout_s=LONG_S, limiter=limiter) == 5
    release.set()


async def test_the_wait_for_a_turn_does_not_count(limiter: anyio.CapacityLimiter) -> None:
    async with asyncio.TaskGroup() as group, limiter:
        waiting = group.create_task(run_interruptible(lambda: 5, timeout_s=0.05, limiter=limiter))
        await asyncio.wait({waiting}, timeout=0.2)
        assert not waiting.done()
    assert waiting.result() == 5


async def test_an_interrupt_that_comes_late_hits_nothing_else(limiter: anyio.CapacityLimiter) -> None:
    """Threads are used again. Work that ends just when its time does must leave nothing behind in its own."""
    num_late = 0
    for i in range(300):
        try:
            await run_interruptible(lambda: sum(range(100)), timeout_s=i * 2e-6, limiter=limiter)
        except TimeoutError:
            num_late += 1
        assert await run_interruptible(lambda: sum(range(10_000)), timeout_s=LONG_S, limiter=limiter) == 49995000
    assert num_late > 0


AFTERWARDS = """
import asyncio, sys, threading, time
import anyio
from server.interruptible import run_interruptible

def endless():
    while True:
        pass

def asleep():
    time.sleep(0.3)  # in C: the interrupt has not arrived when it ends

async def main():
    limiter = anyio.CapacityLimiter(1)
    await run_interruptible(threading.get_ident, timeout_s=30, limiter=limiter)
    for work in (endless, asleep):
        try:
            await run_interruptible(work, timeout_s=0.1, limiter=limiter)
        except TimeoutError:
            pass
    await asyncio.sleep(0.5)
    sys.settrace(lambda *_: None)
    threading.get_ident()
    (lambda: None)()
    sys.settrace(None)
    print("goes on")

asyncio.run(main())
"""


def test_nothing_is_left_behind_in_the_interpreter() -> None:
    """An interrupt that is taken back would be looked for ever after; under a tracer nothing else would be done."""
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "goes on\n", done.stderr
