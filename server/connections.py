"""Connections that cost and do not ask: how long a request's head may take, and how many may be open.

uvicorn closes a connection that is silent between two requests, and no other: one that sends a byte of a header a
minute stays for ever, and enough of them use up the file descriptors (slowloris). Its `limit_concurrency` answers 503
to everybody from then on, health probes too, which is what such a client wants. So here

- a request's head must be there within `header_timeout` seconds, and so must what is left of a body that nobody reads
  any more (a refused request's); the time that a body takes while it is read is `middleware.TimeBody`'s;
- when there are more than `max_connections`, the one that has waited longest for a request goes. Clients notice no
  more of that than of any closed keep-alive connection: the next request takes a new one. Only when all others are
  being answered the new one goes, with a 503;
- a TLS handshake (`handshakes`) and the farewell at the end of TLS count as connections that wait, and go like them;
- what cannot be parsed, and what is too large before its body begins (`heads`), is a request like others, that is
  refused: it goes to the application with the error in its scope, is answered in its turn, logged and counted there
  (`middleware.RefuseUnfit`), and ends the connection. Nothing that comes behind it is read;
- a client that takes nothing of its answer for `write_timeout` seconds is cut off (`outgoing`).

A connection that ends while its client still sends is not closed at once: the kernel would answer what comes with a
reset, and the client might see that instead of what it was told.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from config.schema import ServerConfig
from server.heads import HeadBounds, InvalidHttp, UnfitRequest, check_head, what_is_wrong
from server.limits import MAX_PIPELINED
from server.outgoing import Outgoing

logger = logging.getLogger(__name__)

_MOST_BY_DEFAULT = 8192
_RESERVED_FILES = 128
"""File descriptors for all but connections: libraries, weights, logs, the engine."""

_LINGER_S = 2.0
"""How long what a client still sends is thrown away, so that it can read why nobody wants it."""

_TLS_TICK_S = 0.25

_UNKNOWN = "-"
"""Method and path of what has none."""

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
        write_timeout_s = config.write_timeout or None
        max_connections = config.max_connections or _default_max_connections()
        waiting: ClassVar[dict[Connection, None]] = {}
        shaking: ClassVar[dict[Connection, Callable[[], None]]] = {}

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
    write_timeout_s: float | None
    max_connections: int
    waiting: ClassVar[dict[Connection, None]]
    """All connections that no request is being answered on, the longest waiting first. Event loop only."""
    shaking: ClassVar[dict[Connection, Callable[[], None]]]
    """Those of them that shake hands, for TLS, and what ends it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._head = HeadBounds()
        self._outgoing: Outgoing
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the one that came last."""
        self._is_deaf = False
        """Nothing that comes is read any more."""
        self._is_leaving = False
        """The last answer has been given."""

    def handshake_begun(self, cut_off: Callable[[], None]) -> bool:
        """See handshakes.Greeted."""
        self.shaking[self] = cut_off
        self.waiting[self] = None
        self._keep_to_the_most()
        return self in self.shaking

    def handshake_ended(self) -> None:
        """See handshakes.Greeted."""
        self.shaking.pop(self, None)
        if self.transport is None:  # it has failed
            self.waiting.pop(self, None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        is_new = self.shaking.pop(self, None) is None
        super().connection_made(transport)
        self._outgoing = Outgoing(
            transport, self.write_timeout_s, self.loop, on_close=self._leave, on_stopped=self._log_stopped_reader
        )
        self._wait()
        self._set_deadline()
        if is_new:
            self._keep_to_the_most()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._clear_deadline()
        self._outgoing.forget()
        self.waiting.pop(self, None)
        if self._answered is not None and not self._answered.response_complete:  # uvicorn tells the last one only
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come; the first ones after an answer stop uvicorn's timer for silent connections."""
        if self._is_deaf:
            return
        if self in self.waiting:
            self._set_deadline()
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except UnfitRequest as error:
            self._refuse(error)

    def _parse(self, data: bytes) -> None:
        """Raises UnfitRequest."""
        while data:
            rest = b""
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                rest = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserCallbackError as error:
                if isinstance(error.__context__, UnfitRequest):
                    raise error.__context__ from None
                logger.exception("a request could not be taken")
                raise InvalidHttp("the request cannot be understood") from None
            except httptools.HttpParserError as error:
                raise what_is_wrong(error, data, is_first=self.cycle is None) from None
            self._head.add_read(len(data))
            data = rest

    def _without_upgrade(self) -> bytes:
        """The head that asked for another protocol, without that, for a new parser.

        Nothing else is spoken here, so it is answered as if it had not asked (RFC 9110 7.8); Java's client asks for
        HTTP/2 with each first request. The parser takes what follows for the other protocol, even a body.
        """
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head.begin()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Some of its URL has come. Raises UrlTooLong."""
        super().on_url(url)
        self._head.add_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come. Raises HeadTooLarge."""
        self._head.add_header(name, value)
        if self._head.is_open:  # a trailer is none, whatever it is called
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request's head is there. Raises InvalidHttp."""
        check_head(self.parser.get_method(), self.url, self.parser.get_http_version(), self.headers)
        if self.parser.should_upgrade():
            return  # `_without_upgrade` sees to it
        if len(self.pipeline) >= MAX_PIPELINED:
            raise InvalidHttp(f"more than {MAX_PIPELINED} requests wait on this connection: they are to wait elsewhere")
        self._head.end()
        self._clear_deadline()
        self.waiting.pop(self, None)
        super().on_headers_complete()
        self._adopt(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Some of its body has come."""
        self._head.move()
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """A part of its body begins."""
        self._head.move()

    def on_message_complete(self) -> None:
        """All of it has come."""
        self._head.move()
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request has been answered, perhaps before all of its body came."""
        if self._is_leaving:
            self.server_state.total_requests += 1
            self._wait()
            return
        if self.cycle.response_complete:  # else another request waits behind it
            self._wait()
            if self.cycle.more_body:
                self._set_deadline()
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _adopt(self, cycle: RequestResponseCycle) -> None:
        """Take over from uvicorn how a request's connection ends, and go on reading while it waits.

        uvicorn would read nothing until its turn comes, and so not see the client leave. How many wait is bounded.
        """
        cycle.transport = self._outgoing
        if self.pipeline:
            self.flow.resume_reading()

    def _refuse(self, error: UnfitRequest) -> None:
        """Answer what is unfit with its error: the request that it is part of, or a request of its own."""
        self._is_deaf = True
        client = self.client[0] if self.client else "somebody"
        logger.info("a request of %s is refused: %s", client, error)
        if self._head.is_open or self.cycle is None or not self.cycle.more_body:
            self._answer_unfit(error)
        elif self.cycle.response_complete:
            self._leave()
        else:  # its body is what is unfit
            self.cycle.scope["state"]["unfit"] = error
            self.cycle.keep_alive = False
            self.cycle.message_event.set()

    def _answer_unfit(self, error: UnfitRequest) -> None:
        if not self._head.is_open:  # so little has come that the parser has not said that a request begins
            self.on_message_begin()
        self._clear_deadline()
        self.waiting.pop(self, None)
        scope: Any = self.scope
        scope["method"], scope["path"] = self._method_and_path()
        scope["raw_path"], scope["query_string"] = scope["path"].encode(), b""
        scope["state"]["unfit"] = error
        is_next = self.cycle is None or self.cycle.response_complete
        self.cycle = RequestResponseCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=self.on_response_complete,
        )
        self._adopt(self.cycle)
        if is_next:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def _method_and_path(self) -> tuple[str, str]:
        """For the log, of a head that has not ended or is wrong."""
        try:
            path = httptools.parse_url(self.url).path
        except httptools.HttpParserInvalidURLError:
            path = None
        if path is None:
            return _UNKNOWN, _UNKNOWN
        return self.parser.get_method().decode(), path.decode("ascii", "replace")

    def _leave(self) -> None:
        """Close, after the last answer: at once if the client has nothing more to say."""
        self._is_leaving = True
        self.pipeline.clear()
        if not (self._is_deaf or self.cycle.more_body):
            self._close()
        elif not self.transport.is_closing():
            self._is_deaf = True
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._clear_deadline()
            self._deadline = self.loop.call_later(_LINGER_S, self.transport.close)

    def timeout_keep_alive_handler(self) -> None:
        """The client has not asked again. (Perhaps it still reads.)"""
        self._close()

    def _close(self) -> None:
        """Close when all is sent. TLS, as asyncio has it, cuts off what is not within 30 s: so this waits by itself."""
        if self.scheme == "https" and not self.transport.is_closing() and not self._outgoing.is_read():
            self._clear_deadline()
            self._deadline = self.loop.call_later(_TLS_TICK_S, self._close)
        elif not self.transport.is_closing():
            self.transport.close()
            if self.scheme == "https":  # asyncio gives the client 30 s to say farewell: it may, if there is room
                self.waiting[self] = None

    def _log_stopped_reader(self) -> None:
        logger.info("a client is cut off: it has taken nothing of its answer for %g s", self.write_timeout_s)

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

    def _keep_to_the_most(self) -> None:
        """Send away the one that has waited longest, if there is one too many; this one waits, too."""
        if len(self.connections) + len(self.shaking) <= self.max_connections:
            return
        oldest = next(iter(self.waiting))
        if oldest is self:
            logger.warning("a connection was refused: all %d are being answered", self.max_connections)
        if oldest is self and self not in self.shaking:
            self._outgoing.write(_NO_ROOM)
            self._close()
        else:
            oldest._go()

    def _go(self) -> None:
        """End, when all is sent, without the farewell that TLS has."""
        del self.waiting[self]
        if (cut_off := self.shaking.pop(self, None)) is not None:
            cut_off()
        elif self.scheme == "https" and self._outgoing.is_read():
            self.transport.abort()
        else:
            self._close()
