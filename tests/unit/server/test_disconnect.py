"""Work for a client that may leave."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from server.disconnect import while_connected

pytestmark = pytest.mark.anyio


class Client:
    """`receive` of a client that stays until `leave()`."""

    def __init__(self) -> None:
        self._gone = asyncio.Event()
        self._has_woken = False

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> Message:
        if not self._has_woken:  # uvicorn may wake up with an empty body first
            self._has_woken = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}


class Work:
    """A task that waits for `go`, and tells how it ended."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.ended = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> str:
        try:
            await self.go.wait()
            return "done"
        finally:
            await asyncio.sleep(0)  # ends a little after it is cancelled
            self.ended = True


async def test_the_work_is_waited_for() -> None:
    work = Work()
    work.go.set()
    await while_connected(Client().receive, work.task)
    assert work.task.result() == "done"


async def test_a_client_that_leaves_cancels_the_work_and_it_has_ended_then() -> None:
    client, work = Client(), Work()
    asyncio.get_running_loop().call_soon(client.leave)
    with pytest.raises(ClientDisconnect):
        await while_connected(client.receive, work.task)
    assert work.task.cancelled()
    assert work.ended


async def test_being_cancelled_cancels_the_work() -> None:
    work = Work()
    waiting = asyncio.create_task(while_connected(Client().receive, work.task))
    asyncio.get_running_loop().call_later(0, waiting.cancel)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.ended


async def test_after_the_timeout_the_work_goes_on() -> None:
    work = Work()
    await while_connected(Client().receive, work.task, timeout_s=0.001)
    assert not work.task.done()
    work.go.set()
    assert await work.task == "done"


async def test_nothing_is_left_behind() -> None:
    before = asyncio.all_tasks()
    work = Work()
    work.go.set()
    await while_connected(Client().receive, work.task)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
