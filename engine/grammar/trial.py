"""TrialProcess: tries grammars where they can do no harm.

A grammar is a program that a client sends. Most of what can go wrong with one is bounded by llguidance itself, but not
all of it (1.9): `{"multipleOf": 99999989}` compiles for minutes, and a chain of 5000 rules or `$ref`s overflows the
stack, which ends the process. No thread can be stopped, and no stack overflow caught; so each new grammar is compiled
in a process of its own first (`trial_process`), with bounds on time, memory and stack that the kernel keeps. Forked
from one that has the tokenizer ready, that costs some 20 ms, once for each grammar.

What passes there is compiled again in this process, at the same cost: compiled grammars cannot be sent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CPU_S = 1.5
"""CPU time to compile a grammar in. Schemas of 100 KB need some tenths of a second."""
WALL_S = 15.0
"""... and time on the clock, if the machine is so busy."""
MEMORY_BYTES = 512 * 2**20
"""Memory to compile a grammar in, beside what the tokenizer takes."""

_SCRIPT = Path(__file__).with_name("trial_process.py")


class GrammarError(Exception):
    """This grammar cannot be used, and why."""


class TrialError(Exception):
    """The process has ended: its own fault, not the grammar's."""


class TrialProcess:
    """A process that tries one grammar at a time. One thread only; `close` it."""

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int], limits: Mapping[str, Any]) -> None:
        """Starts it, and returns before it is ready. `limits` are llguidance's own."""
        self._process = subprocess.Popen(  # noqa: S603 (the command is fixed)
            # -P: not the script's folder first on the path, since some modules there are named like others elsewhere
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # llguidance's own words; what they say comes back as an answer
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the server, which may go on for a while
        )
        setup = {
            "tokenizer": tokenizer_json,
            "eos_token_ids": list(eos_token_ids),
            "limits": dict(limits),
            "cpu_s": CPU_S,
            "wall_s": WALL_S,
            "memory_bytes": MEMORY_BYTES,
        }
        self._write(setup)

    def run(self, grammar: str) -> int:
        """Try a grammar, as llguidance takes it; returns how many bytes it takes, compiled.

        Raises GrammarError if it cannot be compiled within bounds, TrialError if the process is no more.
        """
        self._write(grammar)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TrialError("the process that tries grammars has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise GrammarError(answer["error"])
        num_bytes: int = answer["num_bytes"]
        return num_bytes

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _write(self, message: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TrialError("the process that tries grammars has ended") from None
