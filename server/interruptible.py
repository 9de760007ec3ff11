"""Python code that must not run for ever, in a thread that can be interrupted.

Chat templates are programs. They come with the model, but what they do with a conversation is up to it: a loop over
all pairs of messages is harmless with ten and takes hours with ten thousand. Python cannot stop a thread; it can raise
an exception in one, which arrives at the next loop or call (`PyThreadState_SetAsyncExc`). So it ends whatever is
written in Python, as compiled templates are. A single operation in C goes on to its end; nobody waits for it.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import threading
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

from anyio import CapacityLimiter, to_thread

_T = TypeVar("_T")

_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in_thread.argtypes = (ctypes.c_ulong, ctypes.py_object)


class Interrupted(BaseException):
    """Ends the work. Not an Exception: what catches those goes on."""


async def run_interruptible(work: Callable[[], _T], *, timeout_s: float, limiter: CapacityLimiter) -> _T:
    """The result of `work`, which is called in a worker thread when `limiter` lets it.

    Raises what it raises, and TimeoutError `timeout_s` after it began. Then, and when this is cancelled, the work is
    interrupted.
    """
    job = _Job(work)
    async with limiter:
        try:
            async with asyncio.timeout(timeout_s):
                return await to_thread.run_sync(job.call, abandon_on_cancel=True, limiter=_unlimited())
        finally:
            job.interrupt()


@cache
def _unlimited() -> CapacityLimiter:
    """`run_interruptible`'s own has let it, and one that is stuck must hold nobody up."""
    return CapacityLimiter(math.inf)


class _Job(Generic[_T]):
    """One call: `call` in its thread, `interrupt` on the event loop."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        """Of the thread while the work goes on: only then may it be interrupted. Under the lock."""
        self._is_over = False
        """Nobody wants it any more. Under the lock."""
        self._is_interrupted = False
        """An interrupt has been sent. Under the lock."""

    def call(self) -> _T:
        """Do the work."""
        with self._lock:
            if self._is_over:  # no thread was free in time
                raise Interrupted
            self._thread_id = threading.get_ident()
        try:
            return self._work()
        finally:
            self._end()

    def interrupt(self) -> None:
        """End the work, if it goes on."""
        with self._lock:
            self._is_over = True
            if self._thread_id is not None:
                self._is_interrupted = True
                _raise_in_thread(self._thread_id, Interrupted)

    def _end(self) -> None:
        """From here on there are no interrupts, and one that has not arrived yet does so now: others use the thread.

        It is not taken back, though one may: Python 3.11's interpreter then goes on looking for it at every call, in
        all threads, and under a tracer never gets beyond that.
        """
        with self._lock:
            self._thread_id = None
        if self._is_interrupted:
            try:
                _raise_in_thread(threading.get_ident(), Interrupted)  # in place of one that has not arrived
                while True:
                    pass
            except Interrupted:
                pass
