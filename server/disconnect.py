"""A client that leaves cancels the work for it."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive


async def while_connected(receive: Receive, work: asyncio.Task[Any], timeout_s: float | None = None) -> None:
    """Wait until `work` is done, or `timeout_s` has passed.

    Raises ClientDisconnect if the client leaves before; then, and when this is cancelled, `work` has been cancelled and
    has ended. The request's body must have been read: `receive` has nothing but the disconnect to tell any more.
    """
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({work, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not work.done():
            raise ClientDisconnect
    except BaseException:
        work.cancel()
        await asyncio.wait({work})
        raise
    finally:
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
