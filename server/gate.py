"""The application while there is none yet: the port is open, the model is loading."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOADING = json.dumps(
    {"error": {"message": "The model is loading.", "type": "service_unavailable", "param": None, "code": "loading"}}
).encode()


class Gate:
    """An ASGI application that answers 503 (but /live 200) until `open` gives it the real one."""

    def __init__(self) -> None:
        self._application: Application = _while_loading

    def open(self, application: Application) -> None:
        """From now on `application` answers."""
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application(scope, receive, send)


async def _while_loading(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":  # a web socket: not accepting it refuses it
        return
    alive = scope["path"] == "/live"
    headers = [(b"content-type", b"application/json")]
    if not alive:
        headers.append((b"retry-after", b"5"))
    await send({"type": "http.response.start", "status": 200 if alive else 503, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"status": "loading"}' if alive else _LOADING})
