"""Metrics over HTTP: the `/metrics` route, and the counting of responses."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.metrics.exporter import Metrics

_NO_ROUTE = "none"  # refused before routing, or no such path: one series, whatever clients make up


def router(metrics: Metrics) -> APIRouter:
    """The `/metrics` route. It reads what is there and never waits for the engine."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
    async def scrape(request: Request) -> Response:
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    return routes


class CountResponses:
    """ASGI middleware: tells the metrics each response's route and status, when it begins."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", _NO_ROUTE)  # routing has put it into the scope by now
                self._metrics.responded(route, message["status"])
            await send(message)

        await self._app(scope, receive, counting_send)
