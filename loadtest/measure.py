"""measure(): one load on one server, from jobs to figures, with the live line."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console

from loadtest.client import Client, first_model, server_version
from loadtest.report import Summary, summarize
from loadtest.runner import ClosedLoop, OpenLoop
from loadtest.target import Target
from loadtest.view import live_line
from loadtest.workload import LoadSpec, make_jobs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that has answered, and what it said of itself."""

    target: Target
    model: str
    version: Any
    """What /version says, parsed; None when it says nothing."""

    @classmethod
    async def ask(cls, target: Target, model: str | None) -> Server:
        """Learn the version, and the model unless it is given. Raises ServerUnusable."""
        return cls(target, model or await first_model(target), await server_version(target))

    def to_json(self) -> dict[str, Any]:
        """For a result file."""
        return {"url": self.target.url, "model": self.model, "version": self.version}


async def measure(server: Server, spec: LoadSpec, pace: ClosedLoop | OpenLoop, *, timeout_s: float) -> Summary:
    """Put `spec` on `server` at `pace`. Failed requests are in the figures; nothing is raised for them."""
    client = Client(server.target, spec.path, timeout_s=timeout_s)
    jobs = make_jobs(spec, server.model)
    async with live_line(Console(stderr=True), client.counters, len(jobs)):
        return summarize(await pace.run(client, jobs))


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run the event loop: uvloop's, which halves the cost of a token, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
