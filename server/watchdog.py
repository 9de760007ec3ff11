"""Watchdog: sees that the engine or the event loop hangs, says so, and ends the process when it does not go on.

    beat ---------- ok, ok, ok, then the same turn for `stall_s` -> /health 503, stacks of all threads into the log
                    ... and for `grace_s` more                   -> open requests fail, the process ends with status 1

What hangs cannot tell of it, so a thread looks at three things, some times a second:

- *the engine thread*: it works on one turn (`AsyncEngine.turn_began_s`) and does not end it. Waiting for work is none.
  The longest turn of a healthy engine is one step of `max_num_batched_tokens`; loading has run the model already, so
  that the first step compiles nothing. With chunked prefill off a step is as long as a prompt, and gets as much longer.
- *the engine thread's end*, even if nobody was told of it.
- *the event loop*: a call that it is asked to make is not made. Then nobody gets an answer from /health either.

Python code that holds the interpreter's lock (a regular expression that backtracks for ever, say) stops this thread as
well. For that there is a timer in C (`faulthandler`), which is wound up anew as long as all is well.

Time is counted in the thread's own short waits, not read off a clock: a process that was stopped, or a machine that
slept, has not hung, and nobody can set the clock forward. (Only the timer in C cannot tell: a process that is stopped
for longer than both times and `LAST_RESORT_S` ends when it is let go on.)
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from config.schema import Settings
from engine.core import ModelInfo
from engine.errors import EngineDead

logger = logging.getLogger(__name__)

LAST_RESORT_S = 30.0
"""By how much the timer in C outlasts the times that this thread keeps."""
ENDING_S = 15.0
"""How long open requests have to tell their clients."""
STATUS = 1
"""Exit status of a process that hung."""
_MAX_INTERVAL_S = 1.0
_LOOKS_PER_STALL = 20


class Watched(Protocol):
    """What is looked at of the engine; all of it from any thread."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""

    @property
    def dead(self) -> EngineDead | None:
        """Why it computes no more."""

    @property
    def is_lost(self) -> bool:
        """Whether its thread is gone, and nobody was told."""

    @property
    def turn_began_s(self) -> float | None:
        """When it took up what it does now; None while idle."""


class Watchdog:
    """Looks at one engine, and at the event loop that it is started on. `start` and `stop` are optional: without them
    `problem` knows of an engine that has ended, not of one that hangs."""

    def __init__(self, engine: Watched, *, stall_s: float, grace_s: float) -> None:
        self._engine = engine
        self._stall_s = stall_s
        self._grace_s = grace_s
        self._interval_s = min(_MAX_INTERVAL_S, stall_s / _LOOKS_PER_STALL)
        self._stop = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._hang: str | None = None
        self._turn_began_s: float | None = None
        self._turn_s = 0.0
        """For how long the engine has been seen in that turn."""
        self._loop_answered = False
        self._loop_silent_s = 0.0

    @classmethod
    def of(cls, settings: Settings, engine: Watched) -> Watchdog:
        """As the settings say."""
        scheduler = settings.engine.scheduler
        steps = (
            1.0 if scheduler.enable_chunked_prefill else engine.info.max_model_len / scheduler.max_num_batched_tokens
        )
        stall_s = settings.server.stall_timeout * max(1.0, steps)
        return cls(engine, stall_s=stall_s, grace_s=settings.server.stall_grace)

    @property
    def problem(self) -> str | None:
        """Why the server cannot do its work now; None while it can. Any thread."""
        if (dead := self._engine.dead) is not None:
            return f"the engine has ended: {dead}"
        return self._hang

    def start(self, on_hang: Callable[[EngineDead], None]) -> None:
        """Begin to look. Event loop only: `on_hang` is called on it when the process is to end, with the reason.

        `on_hang` ends the process with STATUS; where it fails to, this thread does.
        """
        self._loop = asyncio.get_running_loop()
        self._on_hang = on_hang
        self._ping()
        self._wind_up_last_resort()
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Nothing if it is about to end the process: it sees to it that it ends."""
        self._stop.set()
        if self._thread.is_alive() and not self._is_ending:
            self._thread.join()

    def _run(self) -> None:
        hung_s, last_s = 0.0, time.monotonic()
        while not self._stop.wait(self._interval_s):
            self._wind_up_last_resort()
            now_s = time.monotonic()
            passed_s, last_s = min(now_s - last_s, 2 * self._interval_s), now_s
            if self._look(passed_s) is None:
                hung_s = 0.0
            elif (hung_s := hung_s + passed_s) > self._grace_s:
                self._end()
        faulthandler.cancel_dump_traceback_later()

    def _look(self, passed_s: float) -> str | None:
        """What hangs, if something does. Tells the log when that changes."""
        hang = self._engine_hang(passed_s) or self._event_loop_hang(passed_s)
        was, self._hang = self._hang, hang
        if hang is not None and was is None:
            logger.critical("%s; the stacks of all threads follow", hang)
            faulthandler.dump_traceback(sys.stderr)
        elif hang is None and was is not None:
            logger.warning("it goes on again: %s no longer", was)
        return hang

    def _engine_hang(self, passed_s: float) -> str | None:
        if self._engine.is_lost:
            return "the engine thread has ended without a word"
        began_s = self._engine.turn_began_s
        is_same = began_s is not None and began_s == self._turn_began_s and self._engine.dead is None
        self._turn_began_s, self._turn_s = began_s, self._turn_s + passed_s if is_same else 0.0
        if self._turn_s < self._stall_s - self._interval_s:
            return None
        return f"the engine hangs: its step has not ended within {self._stall_s:g} s"

    def _event_loop_hang(self, passed_s: float) -> str | None:
        if self._loop_answered:
            self._loop_silent_s = 0.0
            self._ping()
            return None
        self._loop_silent_s += passed_s
        if self._loop_silent_s < self._stall_s - self._interval_s:
            return None
        return f"the event loop hangs: it has done nothing for {self._stall_s:g} s"

    def _ping(self) -> None:
        """Ask the event loop to answer."""
        self._loop_answered = False
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._loop_answered = True

    def _end(self) -> None:
        """End the process: by way of the event loop if it can still fail the open requests, else at once."""
        self._is_ending = True
        reason = self._hang or ""
        logger.critical("%s, nor in the %g s after that: the process ends", reason, self._grace_s)
        faulthandler.dump_traceback(sys.stderr)
        if self._event_loop_hang(0.0) is None:
            self._loop.call_soon_threadsafe(self._on_hang, EngineDead(reason))
            time.sleep(ENDING_S)  # the process is gone before, if all goes well
        os._exit(STATUS)

    def _wind_up_last_resort(self) -> None:
        faulthandler.dump_traceback_later(self._stall_s + self._grace_s + LAST_RESORT_S, exit=True)
