"""Which requests have a span, and from where to where it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from server.tracing.export import Tracing

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
}
"""Path of a route that generates -> `gen_ai.operation.name`."""


class TraceRequests:
    """ASGI middleware around LogRequests, whose line names the span, and whose record the span is made of."""

    def __init__(self, app: ASGIApp, tracing: Tracing, model: str) -> None:
        self._app = app
        self._tracing = tracing
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        trace = state["trace"] = self._tracing.begin(scope, OPERATIONS[scope["path"]], self._model)
        try:
            await self._app(scope, receive, send)
        finally:
            trace.end(state["ended"])
