"""The application while there is none yet, and when it takes no more: the model is loading, or the server stops."""

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

_STOPPING = json.dumps(
    {"error": {"message": "The server stops.", "type": "service_unavailable", "param": None, "code": "stopping"}}
).encode()


class Gate:
    """An ASGI application that answers 503 (but /live 200) until `open` gives it the real one, and after `close`."""

    def __init__(self) -> None:
        self._application: Application = _while_loading

    def open(self, application: Application) -> None:
        """From now on `application` answers."""
        self._application = application

    def close(self) -> None:
        """From now on nothing new is taken, but to look at: requests that are open go on."""
        if self._application is not _while_loading:
            self._application = _stopping(self._application)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application(scope, receive, send)


async def _while_loading(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":  # a web socket: not accepting it refuses it
        return
    headers = [(b"content-type", b"application/json")]
    if scope["path"] == "/live":
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"status": "loading"}'})
    else:
        await _refuse(send, headers, _LOADING)


def _stopping(application: Application) -> Application:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"] == "POST" or scope["path"] == "/ready"):
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await _refuse(send, headers, _STOPPING)
        else:
            await application(scope, receive, send)

    return answer


async def _refuse(send: Send, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"retry-after", b"5")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
