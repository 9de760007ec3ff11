"""Responses that are made while nobody waits: `background`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import Overloaded
from server import limits
from server.choices import Chunks
from server.responses.making import Making

_RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class _Job:
    making: Making
    task: asyncio.Task[None]


class BackgroundJobs:
    """Those that have not ended yet. Event loop only."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    def start(self, making: Making, chunks: Chunks, on_end: Callable[[], None]) -> None:
        """Make the response; `on_end` is called when it has ended. Raises Overloaded when too many are being made."""
        if len(self._jobs) >= limits.MAX_BACKGROUND_RESPONSES:
            raise Overloaded("too many responses are in the background", retry_after_s=_RETRY_AFTER_S)
        task = asyncio.create_task(making.in_background(chunks), name=making.id)
        self._jobs[making.id] = _Job(making, task)

        def forget(_: asyncio.Task[None]) -> None:
            del self._jobs[making.id]
            on_end()

        task.add_done_callback(forget)

    def get(self, response_id: str, owner: str) -> Making | None:
        """The response that is being made, if it is its owner's who asks."""
        job = self._jobs.get(response_id)
        return job.making if job is not None and job.making.owner == owner else None

    async def cancel(self, making: Making) -> None:
        """End one, if it has not ended yet; its place in the engine is free then, and it is kept as it stands."""
        job = self._jobs.get(making.id)
        if job is None:
            return
        job.task.cancel()
        await asyncio.wait({job.task})
        if job.task.cancelled():
            making.cancel()

    async def close(self) -> None:
        """End all. The process ends, and what it has kept with it."""
        tasks = {job.task for job in self._jobs.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
