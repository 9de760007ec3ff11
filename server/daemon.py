"""The server process: one socket, one engine, uvicorn between them, from the bind to the exit status.

The port is bound and answers before the model loads: a clash shows at once, and an orchestrator sees a process that is
alive and not ready. SIGTERM and SIGINT let open requests finish (`--shutdown-timeout`): the port stays open meanwhile,
so that load balancers see /ready say 503, and new requests get a 503 with `Retry-After`. While loading there are none,
and the process ends at once, which the model cache is made for. A second signal ends it at once, whatever runs.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from config.schema import ModelConfig, Settings
from server.connections import connection_class
from server.gate import Gate
from server.handshakes import loop_factory
from server.logs import quiet_transformers
from server.tls import tls_options

if TYPE_CHECKING:
    from engine.client import AsyncEngine
    from engine.errors import EngineDead
    from engine.progress import Progress
    from server.tracing.export import Tracing

OVERTIME_S = 5
"""How long requests that were failed at the end of the grace period have to say so to their clients."""
_TICK_S = 0.05
SWITCH_INTERVAL_S = 0.0005
"""How long one thread may hold the interpreter while another waits for it. With Python's own 5 ms, the engine thread
finds the event loop in its way after each step, and streams are up to a tenth slower; with less, no faster."""
ENGINE_DIED = 1
"""Exit status when the engine has ended by a fault: a supervisor starts the process again."""


_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
]
"""On every answer: browsers take it for what it says it is, and show it in no page of others."""


class BindError(Exception):
    """The address cannot be listened on. `hint` says what would work."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the address. Raises BindError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.create_server(address[:2], family=family, backlog=2048)
        # Connections inherit it. asyncio sets it only on sockets that it makes; without, a stream takes 40 ms more.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except socket.gaierror as error:
        raise BindError(f"there is no address {host}", hint="--host 127.0.0.1 for this machine only") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            hint = "another program listens there: stop it, or choose another with --port"
            raise BindError(f"port {port} on {host} is in use", hint=hint) from error
        hint = "ports below 1024 need privileges" if error.errno == errno.EACCES else "see --host and --port"
        raise BindError(f"cannot listen on {host} port {port}: {error.strerror}", hint=hint) from error


def run(
    settings: Settings,
    sock: socket.socket,
    show: AbstractContextManager[Progress],
    on_ready: Callable[[AsyncEngine], None],
    tracing: Tracing | None = None,
) -> int:
    """Load, serve, shut down; returns the exit status. Main thread only: it handles signals. Closes `tracing`.

    `show` gives the function that is told the progress of loading; `on_ready` is called when requests are answered.
    Raises ConfigError when the settings cannot be honoured.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # uvicorn sets its own handlers while it serves, then sends the signal once more to those before: exit 0 is ours.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: None)
    with asyncio.Runner(loop_factory=loop_factory(settings.server.header_timeout)) as runner:
        return runner.run(_Daemon(settings, sock, tracing).run(show, on_ready))


class _Server(uvicorn.Server):
    """uvicorn, but the port stays open while requests finish, and those that outlast the grace period get an error
    of ours instead of a torn connection."""

    def __init__(
        self, config: uvicorn.Config, grace_s: float, on_stop: Callable[[], None], on_overtime: Callable[[], None]
    ) -> None:
        """`on_stop` is called when the server is told to stop, `on_overtime` when the grace period is over."""
        super().__init__(config)
        self._grace_s = grace_s
        self._on_stop = on_stop
        self._was_signalled = False
        self._on_overtime = on_overtime

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops the server; one more ends the process, whatever it does."""
        if self._was_signalled:
            os._exit(128 + sig)
        self._was_signalled = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._grace_s, self._on_overtime)
        end_s = loop.time() + self._grace_s + OVERTIME_S
        while self.server_state.tasks and loop.time() < end_s:  # noqa: ASYNC110 - uvicorn tells of no end
            await asyncio.sleep(_TICK_S)
        await super().shutdown(sockets)
        timer.cancel()


class _Daemon:
    def __init__(self, settings: Settings, sock: socket.socket, tracing: Tracing | None) -> None:
        self._settings = settings
        self._sock = sock
        self._tracing = tracing
        self._gate = Gate()
        self._engine_died = False
        self._closing: asyncio.Task[None] | None = None
        self._engine: AsyncEngine | None = None
        grace_s = settings.server.shutdown_timeout
        config = uvicorn.Config(
            self._gate,
            http=connection_class(settings.server),
            ws="none",
            lifespan="off",  # the application has one, but it comes later
            log_config=None,
            access_log=False,  # `requestlog` has a better one
            server_header=False,
            headers=_HEADERS,
            timeout_keep_alive=75,  # longer than the proxies in front: they should be the ones to close
            timeout_graceful_shutdown=1,  # for what `_Server` has not waited for
            **tls_options(settings.access),
        )
        self._server = _Server(config, grace_s, self._gate.close, self._close_engine)

    async def run(self, show: AbstractContextManager[Progress], on_ready: Callable[[AsyncEngine], None]) -> int:
        serving = asyncio.create_task(self._server.serve([self._sock]))
        with show as progress:
            loading = asyncio.create_task(self._load(progress))
            await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            serving.result()
            os._exit(0)  # told to stop, and the thread that loads cannot be: it is somewhere in torch or pip
        try:
            self._engine = loading.result()
            async with self._application(self._engine):
                on_ready(self._engine)
                await serving
        finally:
            self._server.should_exit = True
            await serving
        return ENGINE_DIED if self._engine_died else 0

    async def _load(self, progress: Progress) -> AsyncEngine:
        from engine.client import AsyncEngine

        await asyncio.to_thread(_find_model, self._settings.engine.model, progress)
        progress("importing torch and transformers")
        await asyncio.to_thread(_import_libraries)
        return await AsyncEngine.start(self._settings.engine, progress)

    @asynccontextmanager
    async def _application(self, engine: AsyncEngine) -> AsyncIterator[None]:
        """Answer with the real application; at the end, close the engine."""
        from server.app import create_app
        from server.watchdog import Watchdog

        engine.on_dead(self._on_dead)
        watchdog = Watchdog.of(self._settings, engine)
        try:
            application = create_app(self._settings, engine, watchdog=watchdog, tracing=self._tracing)
            watchdog.start(engine.give_up)
            async with application.router.lifespan_context(application):
                self._gate.open(application)
                yield
        finally:
            watchdog.stop()
            self._close_engine()
            assert self._closing is not None
            await self._closing
            if self._tracing is not None:
                await self._tracing.close()

    def _on_dead(self, _: EngineDead) -> None:
        if self._closing is None:  # else it ends because we told it to
            self._engine_died = True
            self._server.should_exit = True

    def _close_engine(self) -> None:
        """Start to end the engine; every request that is still open fails then."""
        if self._closing is None and self._engine is not None:
            self._closing = asyncio.create_task(self._engine.close())


def _find_model(config: ModelConfig, progress: Progress) -> None:
    """Raise ModelError for a model that is not to be had, before the imports take their seconds; loading asks again."""
    from engine.model.resolve import resolve_model

    resolve_model(config.model, revision=config.revision, cache_dir=config.cache_dir, progress=progress)


def _import_libraries() -> None:
    """Import what takes seconds, in a thread: the event loop answers /live and signals meanwhile."""
    import engine.build  # noqa: F401

    quiet_transformers()
