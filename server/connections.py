"""Connections that cost and do not ask: how long a request's head may take, and how many may be open.

uvicorn closes a connection that is silent between two requests, and no other: one that sends a byte of a header a
minute stays for ever, and enough of them use up the file descriptors (slowloris). Its `limit_concurrency` answers 503
to everybody from then on, health probes too, which is what such a client wants. So here

- a request's head must be there within `header_timeout` seconds, and so must what is left of a body that nobody reads
  any more (a refused request's); the time that a body takes while it is read is `middleware.TimeBody`'s;
- when there are more than `max_connections`, the one that has waited longest for a request goes. Clients notice no
  more of that than of any closed keep-alive connection: the next request takes a new one. Only when all others are
  being answered the new one goes, with a 503.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from config.schema import ServerConfig

logger = logging.getLogger(__name__)

_MOST_BY_DEFAULT = 8192
_RESERVED_FILES = 128
"""File descriptors for all but connections: libraries, weights, logs, the engine."""

_ERROR = {"message": "Too many connections.", "type": "service_unavailable", "param": None, "code": "overloaded"}
_BODY = json.dumps({"error": _ERROR}).encode()
_NO_ROOM = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


def connection_class(config: ServerConfig) -> type[Connection]:
    """The protocol for `uvicorn.Config(http=...)`, which makes one for each connection."""

    class Bounded(Connection):
        header_timeout_s = config.header_timeout
        max_connections = config.max_connections or _default_max_connections()
        waiting: ClassVar[dict[Connection, None]] = {}

    return Bounded


def _default_max_connections() -> int:
    """What the limit of open files allows."""
    try:
        import resource
    except ImportError:  # Windows
        return _MOST_BY_DEFAULT
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_BY_DEFAULT
    return max(1, min(_MOST_BY_DEFAULT, soft - _RESERVED_FILES))


class Connection(HttpToolsProtocol):
    """One client's connection."""

    header_timeout_s: float
    max_connections: int
    waiting: ClassVar[dict[Connection, None]]
    """All connections that no request is being answered on, the longest waiting first. Event loop only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._wait()
        self._set_deadline()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._clear_deadline()
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come; the first ones after an answer stop uvicorn's timer for silent connections."""
        if self in self.waiting:
            self._set_deadline()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """A request's head is there."""
        self._clear_deadline()
        self.waiting.pop(self, None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """A request has been answered, perhaps before all of its body came."""
        if self.cycle.response_complete:  # else another request waits behind it
            self._wait()
            if self.cycle.more_body:
                self._set_deadline()
        super().on_response_complete()

    def _wait(self) -> None:
        if not self.transport.is_closing():
            self.waiting[self] = None

    def _set_deadline(self) -> None:
        """Unless there is one: bytes that come do not move it."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _make_room(self) -> None:
        oldest = next(iter(self.waiting))
        del self.waiting[oldest]
        if oldest is self:
            logger.warning("a connection was refused: all %d are being answered", self.max_connections)
            self.transport.write(_NO_ROOM)
        oldest.transport.close()
