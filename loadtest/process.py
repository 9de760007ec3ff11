"""Servers that a comparison starts itself, and stops when it is done."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from loadtest.client import Client, ServerUnusable, first_model
from loadtest.target import Target
from loadtest.workload import LoadSpec, make_jobs

POLL_S = 0.5
GRACE_S = 20.0
"""From SIGTERM to SIGKILL."""
LOG_LINES = 15
"""Of a server that did not come up: what is shown of its output."""


@asynccontextmanager
async def started(command: str, target: Target, spec: LoadSpec, *, log: Path, timeout_s: float) -> AsyncIterator[None]:
    """Run `command` until the block ends; enter the block when the server at `target` has answered one of `spec`.

    `command` is split as a shell would, but no shell runs it; `env NAME=VALUE program ...` sets variables. Its output
    goes to `log`. Raises ServerUnusable when something answers there already, when the program ends, or when it has
    not answered after `timeout_s`.
    """
    if await _answers(target):
        raise ServerUnusable(f"{target.url} answers before {command!r} was started: stop what is there")
    with log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(command), stdout=output, stderr=output, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise ServerUnusable(f"{command!r} cannot be started: {error}") from error
    try:
        await _wait_until_ready(process, target, spec, log, timeout_s)
        yield
    finally:
        await _stop(process)


async def _wait_until_ready(
    process: asyncio.subprocess.Process, target: Target, spec: LoadSpec, log: Path, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while not await _completes(target, spec, timeout_s):
        if process.returncode is not None:
            raise ServerUnusable(f"it ended with status {process.returncode} before it answered:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerUnusable(f"no answer at {target.url} after {timeout_s:g} s; its output is in {log}")
        await asyncio.sleep(POLL_S)


async def _answers(target: Target) -> bool:
    try:
        await first_model(target)
    except ServerUnusable as error:
        return not isinstance(error.__cause__, OSError)
    return True


async def _completes(target: Target, spec: LoadSpec, timeout_s: float) -> bool:
    """Whether a request succeeds: some servers list their model while they load it."""
    try:
        model = await first_model(target)
    except ServerUnusable:
        return False
    [job] = make_jobs(spec, model)
    return (await Client(target, spec.path, timeout_s=timeout_s).send(job)).failure is None


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the program and what it has started: they are a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_S)
    if process.returncode is None:
        print(f"process {process.pid} does not end", file=sys.stderr)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
