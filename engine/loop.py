"""EngineLoop: the engine thread. Drain the inbox, step the core, deliver one report, again; sleep when idle.

Messages come in through a queue and leave through the one `deliver` callback; the thread shares nothing else. It
loads the model too: the number of OpenMP threads is a property of the thread that sets it.

Crash policy: what `core.step()` raises is nobody's fault that could be named, so the state can no longer be trusted.
The thread ends, `dead` says why, and whoever waits is told through `on_dead`. A supervisor restarts the process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from engine.core import EngineCore
from engine.errors import EngineDead, EngineStopped
from engine.messages import Abort, EngineStats, StepReport, Submit

logger = logging.getLogger(__name__)

IDLE_STATS = EngineStats(
    num_running=0, num_waiting=0, num_used_blocks=0, num_total_blocks=0, num_steps=0, last_step_s=None
)


class EngineLoop:
    """Runs an EngineCore in a thread of its own.

    `make_core`, `deliver` and `on_dead` are called in that thread. `on_loaded` gets the error if `make_core` raised.
    """

    def __init__(
        self,
        make_core: Callable[[], EngineCore],
        *,
        on_loaded: Callable[[BaseException | None], None],
        deliver: Callable[[StepReport], None],
        on_dead: Callable[[EngineDead], None],
    ) -> None:
        self._make_core = make_core
        self._on_loaded = on_loaded
        self._deliver = deliver
        self._on_dead = on_dead
        self._inbox: queue.SimpleQueue[Submit | Abort | None] = queue.SimpleQueue()  # None: stop
        # A daemon: a step that hangs must not keep a process alive that was told to end.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats = IDLE_STATS
        """The engine's state after its last turn. Swapped whole; read from any thread."""
        self.turn_began_s: float | None = None
        """When the thread took up what it does now (time.monotonic()); None while it waits for something to do. A turn
        that does not end is a hang: `server.watchdog` looks at it. Read from any thread."""
        self._dead: EngineDead | None = None

    @property
    def dead(self) -> EngineDead | None:
        """Why the thread computes no more; None while it does. Any thread."""
        return EngineDead("its thread is gone") if self.is_lost else self._dead

    @property
    def is_lost(self) -> bool:
        """Whether the thread has ended without a word: something in C has ended it. Any thread."""
        return self._thread.ident is not None and not self._thread.is_alive() and self._dead is None

    def start(self) -> None:
        """Start loading; `on_loaded` is called when that is done."""
        self._thread.start()

    def post(self, message: Submit | Abort) -> None:
        """Hand the engine a message. Any thread."""
        self._inbox.put(message)

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after its current step; True if it ended in time. Open requests get no further events."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            core = self._make_core()
            self.stats = core.stats()
        except BaseException as error:
            self._dead = EngineDead(f"the engine could not start: {error}")
            self._on_loaded(error)
            return
        self._on_loaded(None)
        try:
            self._turn_until_stopped(core)
            dead: EngineDead = EngineStopped("the engine was told to stop before this request had ended")
        except BaseException as error:
            logger.critical("the engine thread died", exc_info=True)
            dead = EngineDead(f"the engine died: {type(error).__name__}: {error}")
        self._dead = dead
        self._on_dead(dead)

    def _turn_until_stopped(self, core: EngineCore) -> None:
        while self._drain(core):
            core.drop_overdue()
            if core.has_work:
                self.stats = replace(core.stats(), step_started_s=core.now_s())
                report = core.step()
            else:
                report = core.flush()
            self.stats = core.stats()
            self._deliver(report)

    def _drain(self, core: EngineCore) -> bool:
        """Take in all messages, waiting for one if there is nothing to compute; False when told to stop."""
        block = not core.has_work
        self.turn_began_s = None if block else time.monotonic()
        while True:
            try:
                message = self._inbox.get(block)
            except queue.Empty:
                return True
            if block:
                self.turn_began_s = time.monotonic()
            if message is None:
                return False
            if isinstance(message, Submit):
                core.submit(message)
            else:
                core.abort(message)
            block = False
