"""GrammarCompiler: compiles grammars in a thread of its own, and keeps those used last.

    compile(spec) -> Future ... thread: trial (another process, see `trial`) -> compile_grammar ... CompiledGrammar

Nobody waits for a grammar but its requests: neither the engine thread nor the event loop. Requests for one grammar wait
for one compilation. Refusals are kept as well, so that sending a bad grammar again costs nothing.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from engine.errors import EngineError, Overloaded, RequestError
from engine.grammar.matcher import LIMITS, CompiledGrammar, Vocabulary, about, compile_grammar, explain, source_of
from engine.grammar.tags import with_tags_as_text
from engine.grammar.trial import GrammarError, TrialProcess
from engine.params import GrammarSpec

logger = logging.getLogger(__name__)

MAX_GRAMMARS = 128
MAX_BYTES = 256 * 2**20
"""Bounds of the cache; bytes as their trials measure them, mostly some 100 KB each."""
MAX_WAITING = 32
"""Grammars that may wait to be compiled. More are sent away, to try again."""
IDLE_S = 600.0
"""After so long without a new grammar the thread and its process end; the next one starts them again, in a second."""

Compiled = CompiledGrammar | str
"""A grammar, or why it is refused."""


def result_of(spec: GrammarSpec, compiled: Compiled) -> CompiledGrammar:
    """The grammar. Raises RequestError, with the field that it came in, for one that is refused."""
    if isinstance(compiled, str):
        raise RequestError(f"{spec.param} cannot be used: {compiled}", param=spec.param, code="invalid_value")
    return compiled


@dataclass(slots=True, eq=False)
class _Entry:
    """A grammar that is compiled, or will be."""

    spec: GrammarSpec
    future: Future[Compiled]
    num_bytes: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether it need not be compiled (again)."""
        if not self.future.done():
            return True
        if self.future.exception() is not None:
            return False
        compiled = self.future.result()
        return isinstance(compiled, str) or not compiled.is_spent


class GrammarCompiler:
    """Compiles grammars for one model. Any thread. Nothing is started or imported before the first grammar."""

    def __init__(self, tokenizer_json: Callable[[], str], *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`tokenizer_json` gives the Rust tokenizer as JSON; it is called in the compiler's thread."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        # The thread's own:
        self._vocabulary: Vocabulary | None = None
        self._trial: TrialProcess | None = None
        # Everybody's, by the lock of `_wake`, which is held for moments only:
        self._wake = threading.Condition()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # used last, last
        self._waiting: deque[_Entry] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def compile(self, spec: GrammarSpec) -> Future[Compiled]:
        """The grammar, now or soon; give what the future holds to `result_of`. Never waits.

        Raises Overloaded if too many others wait to be compiled. The future raises EngineError if the fault is ours.
        """
        key = hashlib.sha256(repr((spec.kind, spec.prefix, spec.text)).encode()).digest()
        with self._wake:
            entry = self._entries.get(key)
            if entry is None or not entry.is_usable:
                entry = self._entries[key] = self._enqueue(spec)
            self._entries.move_to_end(key)
            return entry.future

    def close(self) -> None:
        """End the thread and its process once nothing waits to be compiled. Does not wait for that."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()

    def _enqueue(self, spec: GrammarSpec) -> _Entry:
        if len(self._waiting) >= MAX_WAITING:
            message = f"{MAX_WAITING} other grammars wait to be compiled: try again in a moment"
            raise Overloaded(message, retry_after_s=1.0)
        entry = _Entry(spec, Future())
        self._waiting.append(entry)
        self._wake.notify()
        if self._thread is None:
            # A daemon: the process may end whatever is being compiled.
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        return entry

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            try:
                compiled = self._compile(entry)
                self._evict()
                entry.future.set_result(compiled)
            except BaseException as error:  # a panic in Rust is no Exception
                logger.error("a grammar could not be compiled", exc_info=error)
                entry.future.set_exception(EngineError(f"the grammar could not be compiled: {error}"))
                self._end_trial()

    def _next(self) -> _Entry | None:
        """The next grammar to compile; None if the thread is to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._is_closed, IDLE_S)
            if self._waiting:
                return self._waiting.popleft()
            self._end_trial()  # before there can be another thread
            self._thread = None
            return None

    def _compile(self, entry: _Entry) -> Compiled:
        try:
            source = source_of(entry.spec)
            if self._trial is None or self._vocabulary is None:
                self._start()
            assert self._trial is not None
            assert self._vocabulary is not None
            entry.num_bytes = self._trial.run(source)
            return compile_grammar(source, self._vocabulary)
        except GrammarError as error:
            return explain(about(entry.spec, str(error)))
        except ModuleNotFoundError:
            return "this server cannot hold outputs to grammars, since the package llguidance is not installed"

    def _start(self) -> None:
        """Start the trial process, and get the vocabulary ready beside it."""
        tokenizer_json = with_tags_as_text(self._tokenizer_json())
        self._trial = self._trial or TrialProcess(tokenizer_json, sorted(self._eos_token_ids), LIMITS)
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(
                tokenizer_json, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
            )

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial.close()
            self._trial = None

    def _evict(self) -> None:
        with self._wake:
            num_bytes = sum(entry.num_bytes for entry in self._entries.values())
            while len(self._entries) > MAX_GRAMMARS or num_bytes > MAX_BYTES:
                _, entry = self._entries.popitem(last=False)
                num_bytes -= entry.num_bytes
