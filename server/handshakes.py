"""TLS handshakes: connections before they are any, which must be counted and closed like others.

asyncio and uvloop make a protocol for each client that they accept, and tell it so when the handshake is over. Until
then nobody has the connection: a client that opens as many as it likes and says nothing would hold a file descriptor
for each until the handshake's time is over, and keep everybody else out. So with TLS connections are accepted here.
One that must go is shut down under the handshake, which then fails as if the client had left: so it works in any state
and with either event loop. A client of which that is done sees its connection end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Connections that are accepted before anything else gets its turn."""

_PAUSE_S = 1.0
"""How long none is accepted when there are no file descriptors left."""

_GONE = frozenset({errno.ECONNABORTED, errno.EAGAIN, errno.EINTR, errno.EPROTO})
"""Why there may be no client to accept although there was."""


class Greeted(Protocol):
    """A connection's protocol that is told of the handshake: `connections.Connection`."""

    def handshake_begun(self, cut_off: Callable[[], None]) -> bool:
        """A client has come; `cut_off` ends its connection. False if there is no room for it."""

    def handshake_ended(self) -> None:
        """It has failed, or the connection has been made."""


class TlsServer:
    """Accepts connections, and shakes hands: as much of an asyncio server as uvicorn knows. Event loop only."""

    def __init__(
        self, greet: Callable[[], Any], sock: socket.socket, context: ssl.SSLContext, *, handshake_timeout_s: float
    ) -> None:
        """`greet` makes a client's protocol, which is `Greeted`; `sock` listens already, and is closed by its owner."""
        self._greet = greet
        self._sock = sock
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._shaking: dict[asyncio.Task[None], socket.socket] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more, and end the handshakes. Connections that are made stay."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)
        for client in self._shaking.values():
            _cut_off(client)

    async def wait_closed(self) -> None:
        """Wait until no handshake is left."""
        if self._shaking:
            await asyncio.wait(self._shaking)

    def _listen(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, _ = self._sock.accept()
            except OSError as error:
                if error.errno not in _GONE:
                    logger.error("no connection can be accepted for %g s: %s", _PAUSE_S, error.strerror)
                    self._loop.remove_reader(self._sock)
                    self._pause = self._loop.call_later(_PAUSE_S, self._listen)
                return
            client.setblocking(False)
            protocol: Greeted = self._greet()
            if protocol.handshake_begun(lambda client=client: _cut_off(client)):  # type: ignore[misc]
                task = self._loop.create_task(self._shake_hands(protocol, client))
                self._shaking[task] = client
                task.add_done_callback(self._shaking.pop)
            else:
                client.close()

    async def _shake_hands(self, protocol: Greeted, client: socket.socket) -> None:
        made: Any = protocol
        try:
            await self._loop.connect_accepted_socket(
                lambda: made, client, ssl=self._context, ssl_handshake_timeout=self._handshake_timeout_s
            )
        except OSError as error:  # ssl.SSLError and TimeoutError are some
            logger.debug("a TLS handshake has failed: %s", error)
        finally:
            protocol.handshake_ended()


def _cut_off(client: socket.socket) -> None:
    with suppress(OSError):  # it has gone
        client.shutdown(socket.SHUT_RDWR)


def loop_factory(
    handshake_timeout_s: float, base: type[asyncio.AbstractEventLoop] | None = None
) -> Callable[[], asyncio.AbstractEventLoop]:
    """Event loops whose TLS servers are a `TlsServer`: uvicorn asks its loop for them. `base`: by default uvloop's."""
    kind = base or _fastest()

    class Loop(kind):  # type: ignore[misc, valid-type]
        async def create_server(
            self, protocol_factory: Callable[[], asyncio.BaseProtocol], *args: Any, **kwargs: Any
        ) -> asyncio.Server | TlsServer:
            if (context := kwargs.get("ssl")) is None:
                server: asyncio.Server = await super().create_server(protocol_factory, *args, **kwargs)
                return server
            return TlsServer(protocol_factory, kwargs["sock"], context, handshake_timeout_s=handshake_timeout_s)

    return Loop


def _fastest() -> type[asyncio.AbstractEventLoop]:
    try:
        from uvloop import Loop
    except ImportError:  # Windows
        from asyncio import SelectorEventLoop as Loop  # type: ignore[assignment]
    return Loop
