"""The process in which grammars are tried before the engine takes them in: see `engine.grammar.trial`.

A script, not a module: it is run by its path and imports nothing of Chairlift's, so that it starts fast and stays
small. It reads JSON lines, first a setup, then one grammar each, and answers each with a line.

Every grammar is tried in a fork of this process, which has the tokenizer ready. There it may use up its CPU time, its
memory or its stack: the kernel ends the fork, and this process says so.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import llguidance

STACK_BYTES = 1 << 20
"""Smaller than any thread's of the server: what runs here does not overflow there."""

_SLOW = "it takes more than {cpu_s:g} s to compile"
_LARGE = "it is nested too deeply, or takes more memory than there is for one"


def main() -> None:
    """Serve until the pipe is closed."""
    setup = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(setup["tokenizer"], eos_token=setup["eos_token_ids"])
    limits = llguidance.LLParserLimits(**setup["limits"])
    os.nice(10)  # the cores are the engine's
    for line in sys.stdin:
        answer = _fork(partial(_try, tokenizer, json.loads(line), limits), setup)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _try(tokenizer: Any, grammar: str, limits: Any) -> dict[str, Any]:
    """Compile, and find the tokens that may come first."""
    before = _memory_bytes()
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return {"error": matcher.get_error()}
    return {"num_bytes": max(_memory_bytes() - before, 0)}


def _fork(work: Callable[[], dict[str, Any]], setup: dict[str, Any]) -> dict[str, Any]:
    """What `work` returns, worked out in a fork within bounds; or what ended it."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        _work_within_bounds(work, setup, sender)
    os.close(sender)
    with open(receiver, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if said:
        answer: dict[str, Any] = json.loads(said)
        return answer
    killed_by = os.waitstatus_to_exitcode(status)
    is_slow = killed_by in (-signal.SIGPROF, -signal.SIGALRM)
    return {"error": (_SLOW if is_slow else _LARGE).format(**setup)}


def _work_within_bounds(work: Callable[[], dict[str, Any]], setup: dict[str, Any], sender: int) -> None:
    """In the fork. Does not return."""
    signal.setitimer(signal.ITIMER_PROF, setup["cpu_s"])  # a machine that is busy is not the grammar's fault,
    signal.setitimer(signal.ITIMER_REAL, setup["wall_s"])  # up to a point
    in_use = _address_space_bytes()
    if in_use is not None:
        resource.setrlimit(resource.RLIMIT_AS, (in_use + setup["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def run() -> None:
        try:
            answer = work()
        except BaseException as error:  # a panic in Rust is no Exception
            answer = {"error": str(error)}
        os.write(sender, json.dumps(answer).encode())

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    os._exit(0)


def _memory_bytes() -> int:
    """Memory of this process that is no file's; 0 where the system does not say."""
    try:
        with open("/proc/self/status") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return 0


def _address_space_bytes() -> int | None:
    """What this process has mapped; None where the system does not say (there the bound is left out)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


if __name__ == "__main__":
    main()
