"""GET /, /live, /ready, /health, /version. None of them waits for the engine."""

from __future__ import annotations

from fastapi import APIRouter

from server import __version__
from server.errors import Unavailable
from server.openapi import ERROR_RESPONSES
from server.protocol.status import Status, Version, Welcome
from server.serving import Serving


def router(serving: Serving) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["Status"], responses=ERROR_RESPONSES)

    @routes.get("/live")
    async def live() -> Status:
        """The process is up."""
        return Status()

    @routes.get("/health")
    async def health() -> Status:
        """The engine gets on with its work, or has none. 503 while it hangs, and once it has ended."""
        _check_working(serving)
        return Status()

    @routes.get("/ready")
    async def ready() -> Status:
        """Requests are taken. 503 while the model loads (`server.gate` says so then) and when /health says so."""
        _check_working(serving)
        return Status()

    @routes.get("/version")
    async def version() -> Version:
        """What runs here."""
        info = serving.engine.info
        return Version(
            version=__version__,
            model=info.name,
            dtype=info.dtype,
            device=info.device,
            kernels=info.kernels,
            torch=serving.torch_version,
            transformers=serving.transformers_version,
        )

    @routes.get("/")
    async def welcome() -> Welcome:
        """For those who open the server's address."""
        return Welcome(version=__version__, model=serving.model)

    return routes


def _check_working(serving: Serving) -> None:
    if (problem := serving.watchdog.problem) is not None:
        raise Unavailable(problem)
