"""AsyncEngine: the engine as the event loop sees it. The only file that knows asyncio *and* the engine thread.

    generate() --Submit--> inbox ... engine thread ... one StepReport per step --call_soon_threadsafe--> _on_report
        ^                                                                                                 |
        +------------------------- each request's events, by its _Stream <--------------------------------+

There is one way out for a request whose client is gone, whose deadline has passed or whose stop string was found:
its generator is closed, and the generator's `finally` posts the Abort. Tokens made meanwhile are dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from config.schema import EngineConfig
from engine import faults
from engine.core import EngineCore, ModelInfo, check_fit
from engine.errors import DeadlineExceeded, EngineDead
from engine.grammar.compiler import GrammarCompiler, result_of
from engine.grammar.matcher import CompiledGrammar
from engine.loop import EngineLoop
from engine.messages import Abort, Deadlines, EngineStats, Event, Failed, Finished, StepReport, Submit
from engine.output import Chunk, RequestOutput, Usage
from engine.params import GrammarSpec, SamplingParams
from engine.progress import Progress
from engine.request import FinishReason
from engine.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine", "Chunk", "Usage"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_NO_DEADLINES = Deadlines()
_TOO_LATE = "the output was not complete by the request's deadline"


@dataclass(slots=True)
class _Stream:
    """One open request: events that its reader has not taken yet. Event loop only."""

    events: list[Event] = field(default_factory=list)
    reader: asyncio.Future[None] | None = None

    def push(self, event: Event) -> None:
        self.events.append(event)
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    @property
    def has_ended(self) -> bool:
        """Whether its end has come, and only has not been taken yet."""
        return bool(self.events) and isinstance(self.events[-1], Finished | Failed)

    async def take(self) -> list[Event]:
        """Wait for events and take all there are: a slow reader gets fewer, larger pieces."""
        if not self.events:
            self.reader = asyncio.get_running_loop().create_future()
            try:
                await self.reader
            finally:
                self.reader = None
        events, self.events = self.events, []
        return events


class AsyncEngine:
    """The engine for asyncio programs. Make one with `await AsyncEngine.start(config)`."""

    def __init__(self, make_core: Callable[[], tuple[EngineCore, Tokenizer]]) -> None:
        """`make_core` is called in the engine thread, by `load`."""
        self._make_core = make_core
        self._asyncio_loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._asyncio_loop.create_future()
        self._streams: dict[int, _Stream] = {}
        self._ids = itertools.count()
        self._observers: list[Callable[[StepReport], None]] = []
        self._dead_callbacks: list[Callable[[EngineDead], None]] = []
        self._given_up: EngineDead | None = None
        self._loop = EngineLoop(
            self._make,
            on_loaded=lambda error: self._call(self._on_loaded, error),
            deliver=lambda report: self._call(self._on_report, report),
            on_dead=lambda error: self._call(self._on_dead, error),
        )
        self.info: ModelInfo
        self.tokenizer: Tokenizer
        self._grammars: GrammarCompiler | None = None

    @classmethod
    async def start(cls, config: EngineConfig, progress: Progress | None = None) -> AsyncEngine:
        """Load the model and start serving. `progress` is called in the engine thread.

        Raises ConfigError (ModelError for the model) when the settings cannot be honoured.
        """
        from engine.build import build_engine  # brings torch and transformers

        engine = cls(lambda: build_engine(config, progress))
        await engine.load()
        for observer in faults.observers(config.faults.faults):
            engine.add_observer(observer)
        return engine

    async def load(self) -> None:
        """Start the engine thread, and wait until `make_core` is through. Raises what it raised."""
        self._loop.start()
        await self._loaded

    @property
    def stats(self) -> EngineStats:
        """The engine's state after its last step. Never waits for it."""
        return self._loop.stats

    @property
    def dead(self) -> EngineDead | None:
        """Why the engine computes no more; None while it does. Any thread."""
        return self._given_up or self._loop.dead

    @property
    def is_lost(self) -> bool:
        """Whether the engine thread has ended without a word. Any thread."""
        return self._loop.is_lost

    @property
    def turn_began_s(self) -> float | None:
        """When the engine thread took up what it does now (time.monotonic()); None while idle. Any thread."""
        return self._loop.turn_began_s

    def add_observer(self, observer: Callable[[StepReport], None]) -> None:
        """Call `observer` with every report, on the event loop, before the requests see their events."""
        self._observers.append(observer)

    def on_dead(self, callback: Callable[[EngineDead], None]) -> None:
        """Call `callback` on the event loop when the engine has ended."""
        self._dead_callbacks.append(callback)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what `generate` would raise at once: RequestError for a request that does not fit, or EngineDead."""
        self._check_alive()
        check_fit(self.info, prompt_token_ids, params)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadlines: Deadlines = _NO_DEADLINES,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate one output, chunk by chunk. Closing the generator aborts the request.

        The request is queued when the first chunk is asked for, and `params.grammar` is compiled then, if it has not
        been. Raises RequestError at once (for a grammar that is refused with the first chunk), EngineError subclasses
        while it runs.
        """
        self.check(prompt_token_ids, params)
        request = Submit(
            request_id=next(self._ids),
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            arrival_s=time.monotonic(),
            deadlines=deadlines,
        )
        return self._generate(request)

    def give_up(self, error: EngineDead) -> None:
        """Take the engine for dead: its thread hangs, or is gone. Open requests fail with `error`. Event loop only."""
        self._given_up = error
        self._on_dead(error)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Stop the engine thread after its current step. Open requests fail with EngineStopped."""
        if self._grammars is not None:  # it has loaded
            self._grammars.close()
        if self._given_up is not None:
            timeout_s = 0.0  # its step does not end
        ended = await asyncio.to_thread(self._loop.stop, timeout_s)
        if not ended:
            logger.error("the engine thread did not end within %g s", timeout_s)

    async def _generate(self, request: Submit) -> AsyncGenerator[Chunk, None]:
        if request.params.grammar is not None:
            request = replace(request, grammar=await self._compile(request.params.grammar, request.deadlines))
        self._check_alive()
        _check_time(request.deadlines)
        output = RequestOutput(self.tokenizer, request)  # may fail: nothing is to be undone yet
        stream = self._streams[request.request_id] = _Stream()
        self._loop.post(request)
        timer = self._end_in_time(request, stream)
        try:
            while True:
                chunk = output.take(await stream.take())
                if chunk.finish_reason is not None:
                    self._abort(request.request_id, chunk.finish_reason)  # nothing, but for a stop string
                    yield chunk
                    return
                yield chunk
        finally:
            if timer is not None:
                timer.cancel()
            self._abort(request.request_id, FinishReason.ABORT)

    async def _compile(self, spec: GrammarSpec, deadlines: Deadlines) -> CompiledGrammar:
        assert self._grammars is not None
        future = self._grammars.compile(spec)
        try:
            async with asyncio.timeout(_seconds_until(deadlines.end_s)):
                # Shielded: others may wait for the same one.
                compiled = await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError:
            _check_time(deadlines)
            raise
        return result_of(spec, compiled)

    def _end_in_time(self, request: Submit, stream: _Stream) -> asyncio.TimerHandle | None:
        """Have the request fail at its deadline: one timer, whatever the number of its tokens.

        It is aborted then and there: its reader may be slow to hear of it.
        """

        def expire() -> None:
            if not stream.has_ended:
                self._abort(request.request_id, FinishReason.ABORT)
                stream.push(Failed(request.request_id, DeadlineExceeded(_TOO_LATE)))

        left_s = _seconds_until(request.deadlines.end_s)
        return None if left_s is None else self._asyncio_loop.call_later(left_s, expire)

    def _abort(self, request_id: int, reason: FinishReason) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._loop.post(Abort(request_id, reason))

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise _fresh(self.dead)

    def _make(self) -> EngineCore:
        core, self.tokenizer = self._make_core()
        self.info = core.info
        self._grammars = GrammarCompiler(
            self.tokenizer.to_json, vocab_size=self.info.vocab_size, eos_token_ids=self.info.eos_token_ids
        )
        return core

    def _call(self, function: Callable[[_T], None], argument: _T) -> None:
        """Run `function` on the event loop. Engine thread. A loop that is closed has nobody left to tell."""
        if not self._asyncio_loop.is_closed():
            self._asyncio_loop.call_soon_threadsafe(function, argument)

    def _on_loaded(self, error: BaseException | None) -> None:
        if self._loaded.done():
            return  # nobody waits any more
        if error is None:
            self._loaded.set_result(None)
        else:
            self._loaded.set_exception(error)

    def _on_report(self, report: StepReport) -> None:
        for observer in self._observers:
            try:
                observer(report)
            except Exception:  # who counts tokens must not cost anybody theirs
                logger.exception("an observer of the engine's steps failed")
        for event in report.events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.push(event)

    def _on_dead(self, error: EngineDead) -> None:
        for request_id, stream in self._streams.items():
            stream.push(Failed(request_id, _fresh(error)))
        callbacks, self._dead_callbacks = self._dead_callbacks, []  # told once, however often it dies
        for callback in callbacks:
            callback(error)


def _fresh(error: EngineDead) -> EngineDead:
    """The same once more: a raised exception collects tracebacks."""
    return type(error)(*error.args)


def _seconds_until(moment_s: float | None) -> float | None:
    """What is left until then; None if that is for ever."""
    return None if moment_s is None else max(0.0, moment_s - time.monotonic())


def _check_time(deadlines: Deadlines) -> None:
    """Raise DeadlineExceeded if there is no time left."""
    if _seconds_until(deadlines.end_s) == 0.0:
        raise DeadlineExceeded(_TOO_LATE)
