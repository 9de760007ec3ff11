"""The application: routes, what stands around them, and its life. The engine is an argument, so tests pass a fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match

from config.schema import Settings
from engine.client import AsyncEngine
from server import __version__
from server.admission import Admission, ReleaseHeld, Throughput
from server.auth import RequireKey, load_keys
from server.errors import routing_error
from server.metrics import CountResponses, Metrics
from server.metrics import router as metrics_router
from server.middleware import AnswerErrors, LimitBody, RefuseUnfit, RequestId, TimeBody
from server.openapi import openapi_of
from server.origins import RequireKnownHost, RequireKnownOrigin, allowed_hosts, allowed_origins
from server.ratelimits import HEADERS as RATE_LIMIT_HEADERS
from server.ratelimits import RateLimits, TellAllowance
from server.requestlog import LogRequests
from server.routes import chat, completions, docs, models, responses, status, tokenize
from server.serving import Serving
from server.tracing.middleware import TraceRequests
from server.watchdog import Watchdog

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig

    from server.tracing.export import Tracing

_DESCRIPTION = "OpenAI-compatible routes to one language model. Errors have one shape everywhere: `ErrorEnvelope`."
_EXPOSED_HEADERS = ["X-Request-Id", "Retry-After", "Retry-After-Ms", *RATE_LIMIT_HEADERS]
"""What pages of other origins may read of an answer, beside its body."""


_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""Of FastAPI's own, which would have a span of each request beside ours, with its query string."""


def create_app(
    settings: Settings,
    engine: AsyncEngine,
    metrics: Metrics | None = None,
    watchdog: Watchdog | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The application that serves `engine`, which has loaded.

    It stays the caller's to close, as do `watchdog` and `tracing`; the last when the application has ended.

    Raises ConfigError for API keys that cannot be read, and for origins that are none. Call it on the event loop that
    the engine was started on.
    """
    keys = load_keys(settings.access)
    if metrics is None:
        metrics = Metrics(
            engine,
            vllm_names=settings.server.vllm_metrics,
            prefix_caching=settings.engine.cache.prefix_caching,
        )
    engine.add_observer(metrics.on_report)
    throughput = Throughput()
    engine.add_observer(throughput.add)
    admission = Admission.of(settings, engine.info, throughput)
    rate_limits = RateLimits.of(settings.server, has_keys=bool(keys), on_refused=metrics.rate_limited)
    serving = Serving.make(settings, engine, watchdog or Watchdog.of(settings, engine), admission, rate_limits)
    app = FastAPI(
        title="Chairlift",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=_lifespan_of(metrics, serving),
        docs_url=None,  # ours: routes.docs
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _on_routing_error},
        telemetry=_NO_TELEMETRY,
    )
    for make_router in (
        completions.router,
        chat.router,
        responses.router,
        tokenize.router,
        models.router,
        status.router,
    ):
        app.include_router(make_router(serving))
    app.include_router(metrics_router(metrics), tags=["Status"])
    app.include_router(docs.router())
    app.openapi = openapi_of(app, needs_key=bool(keys))  # type: ignore[method-assign]
    _surround(app, settings, keys, metrics, rate_limits)
    _observe(app, metrics, tracing, engine.info.name)
    return app


def _surround(
    app: FastAPI, settings: Settings, keys: tuple[str, ...], metrics: Metrics, rate_limits: RateLimits
) -> None:
    """Put the middleware around the routes. Each goes around those before it: `middleware` shows the whole."""
    origins = allowed_origins(settings.access)
    app.add_middleware(ReleaseHeld)
    app.add_middleware(TimeBody, timeout_s=settings.server.body_timeout)
    app.add_middleware(LimitBody)
    if keys:
        app.add_middleware(RequireKey, keys=keys)
    app.add_middleware(RequireKnownOrigin, origins=origins)
    app.add_middleware(RequireKnownHost, names=allowed_hosts(settings.access, settings.server.host))
    app.add_middleware(RefuseUnfit)
    app.add_middleware(AnswerErrors, on_refused=metrics.rejected)
    if rate_limits.is_on:
        app.add_middleware(TellAllowance, clock=rate_limits.clock)
    if origins:  # around the errors too: a page cannot read what comes without these headers
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(origins),
            allow_methods=["DELETE", "GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
        )


def _observe(app: FastAPI, metrics: Metrics, tracing: Tracing | None, model: str) -> None:
    """Put around all of that what only watches."""
    app.add_middleware(LogRequests)
    if tracing is not None:
        app.add_middleware(TraceRequests, tracing=tracing, model=model)
    app.add_middleware(RequestId)
    app.add_middleware(CountResponses, metrics=metrics)


def _lifespan_of(metrics: Metrics, serving: Serving) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(metrics.watch_event_loop())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await serving.jobs.close()

    return lifespan


async def _on_routing_error(request: Request, error: Exception) -> Response:
    """For what the router raises; all other errors go up to AnswerErrors."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        error = HTTPException(405, error.detail, {"Allow": ", ".join(_methods_of_path(request))})
    return routing_error(error, request.method, request.url.path).response()


def _methods_of_path(request: Request) -> list[str]:
    """With which methods this path is there. (The router itself says the first route's only.)"""
    routes: Sequence[BaseRoute] = request.app.routes
    return [
        method
        for method in ("DELETE", "GET", "POST")
        if any(route.matches(dict(request.scope) | {"method": method})[0] is Match.FULL for route in routes)
    ]
