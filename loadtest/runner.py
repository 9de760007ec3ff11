"""Runs a load against one server, in a closed loop of clients or in an open loop at a given rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.client import Client
from loadtest.record import RequestRecord
from loadtest.workload import Job, poisson_arrivals


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run has recorded."""

    records: list[RequestRecord]
    """In the order of the jobs."""
    duration_s: float
    """From the start to the end of the last response."""
    client_cpu_s: float
    """CPU time of this process in it."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients, each of which sends its next request as soon as its last one has been answered."""

    concurrency: int

    async def run(self, client: Client, jobs: Sequence[Job]) -> RunResult:
        """Send all `jobs`, in order."""
        records: dict[int, RequestRecord] = {}
        queue = iter(enumerate(jobs))  # shared: each client takes the next one from it

        async def work() -> None:
            for index, job in queue:
                records[index] = await client.send(job)

        watch = _Stopwatch()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.concurrency, len(jobs))):
                tasks.create_task(work())
        return watch.result([records[index] for index in range(len(jobs))])


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come at `rate` a second, whether or not others have been answered: a Poisson process.

    A request's clock starts when it is due, so that a client that falls behind does not flatter the server.
    """

    rate: float
    seed: int = 0

    async def run(self, client: Client, jobs: Sequence[Job]) -> RunResult:
        """Send all `jobs`, in order."""
        watch = _Stopwatch()
        tasks: list[asyncio.Task[RequestRecord]] = []
        async with asyncio.TaskGroup() as group:
            for job, arrival_s in zip(jobs, poisson_arrivals(len(jobs), self.rate, self.seed), strict=True):
                due_s = watch.start_s + arrival_s
                await asyncio.sleep(due_s - time.perf_counter())
                tasks.append(group.create_task(client.send(job, due_s=due_s)))
        return watch.result([task.result() for task in tasks])


class _Stopwatch:
    def __init__(self) -> None:
        self.start_s = time.perf_counter()
        self._cpu_s = time.process_time()

    def result(self, records: list[RequestRecord]) -> RunResult:
        return RunResult(records, time.perf_counter() - self.start_s, time.process_time() - self._cpu_s)
