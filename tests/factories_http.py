"""The application over a FakeEngine, in this process, and what streams look like from outside."""

from __future__ import annotations

import json
from typing import Any, cast

import anyio.lowlevel
import httpx

from config.describe import assemble, describe
from engine.client import AsyncEngine
from server.app import create_app
from server.metrics import Metrics
from server.tracing.export import Tracing
from tests.factories_engine import FakeEngine


class Clock:
    """A monotonic clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def make_app(
    engine: FakeEngine, metrics: Metrics | None = None, tracing: Tracing | None = None, **settings: Any
) -> Any:
    """`settings`: by name. The server answers to any name, unless `allowed_hosts` says which."""
    assert settings.keys() <= {setting.name for setting in describe()}
    values = {"model": "smollm2", "allowed_hosts": ("*",)} | settings
    return create_app(assemble(values), cast(AsyncEngine, engine), metrics, tracing=tracing)


def make_client(
    engine: FakeEngine | None = None, metrics: Metrics | None = None, tracing: Tracing | None = None, **settings: Any
) -> httpx.AsyncClient:
    """A client of the application. Streams come whole: what happens while they run is tested over sockets."""
    app = make_app(engine or FakeEngine(), metrics, tracing, **settings)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of each event of a stream, which must be well formed and end with [DONE] (left out)."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *lines, end = response.text.split("\n\n")
    assert end == ""
    assert all(line.startswith(("data: ", ": ")) and "\n" not in line for line in lines), lines
    data = [line.removeprefix("data: ") for line in lines if not line.startswith(":")]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


async def delete_at_end(client: httpx.AsyncClient, response_id: str) -> None:
    """Wait until a response in the background has ended, and its task with it; then delete it."""
    path = f"/v1/responses/{response_id}"
    while (await client.get(path)).json()["status"] in ("queued", "in_progress"):
        await anyio.lowlevel.checkpoint()
    await client.delete(path)  # which waits for the task
