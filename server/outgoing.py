"""What a connection's answers are written to, and how long that may get nowhere.

What a client does not read piles up: in its machine, as that bounds it; in this one's kernel, `_MAX_IN_SOCKET` not yet
sent; in the transport, up to 64 KiB of a stream (uvicorn's flow control stops it there) and all of what is written in
one piece; behind it the events that the engine has for the request, which are as many as its tokens. So memory is
bounded, but time is not: a reader that stops holds its place, and after the answer its connection. It has `timeout_s`.

A slow reader is none that has stopped: whatever the client's kernel has taken counts. Linux tells how much that is
(TCP_INFO). The transport's buffer, which is looked at elsewhere, moves in steps as large as the socket's, or as TLS's.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MAX_IN_SOCKET = 128 * 1024
"""Bytes. The kernel would take 4 MB of what nobody reads, a whole stream."""

_NUM_CHECKS = 4
"""In one `timeout_s`. They are counted, not the time: when all stood still (SIGSTOP, a blocked loop) no client did."""

_GONE = (OSError, ValueError)
"""What a socket raises that has been closed; uvloop's, having no descriptor left, the latter."""

# linux/tcp.h, struct tcp_info: tcpi_unacked, tcpi_bytes_acked, tcpi_notsent_bytes
_TCP_INFO = struct.Struct("@24xI92xQ16xI")


class Outgoing(asyncio.Transport):
    """The writing half of a transport, as `RequestResponseCycle` uses it. Event loop only."""

    def __init__(
        self,
        transport: asyncio.Transport,
        timeout_s: float | None,
        loop: asyncio.AbstractEventLoop,
        *,
        on_close: Callable[[], None],
        on_stopped: Callable[[], None],
    ) -> None:
        """`on_close` is called when the last answer has been written; `on_stopped` before the connection is aborted."""
        super().__init__()
        self._transport = transport
        self._timeout_s = timeout_s
        self._on_close = on_close
        self._on_stopped = on_stopped
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._has_written = False
        self._num_written = 0
        self._num_taken: int | None = None
        """At the last check; None if that was long ago."""
        self._num_idle = 0
        """Checks that found it no more than the one before."""
        self._socket = _tcp_socket_of(transport)
        if self._socket is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with suppress(*_GONE):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_IN_SOCKET)

    def write(self, data: Any) -> None:
        """See asyncio.WriteTransport."""
        self._transport.write(data)
        self._has_written = True
        self._num_written += len(data)
        if self._timer is None and self._timeout_s is not None:
            self._num_taken = None
            self._check_later(self._timeout_s)

    def is_closing(self) -> bool:
        """See asyncio.BaseTransport."""
        return self._transport.is_closing()

    def close(self) -> None:
        """No answer comes after this one."""
        self._on_close()

    def forget(self) -> None:
        """The connection has gone."""
        if self._timer is not None:
            self._timer.cancel()

    def is_read(self) -> bool:
        """Whether the client has all that was written to it, as far as can be known. (Not what TLS itself sends.)"""
        return not (self._has_written and self._progress()[1])

    def _check_later(self, timeout_s: float) -> None:
        self._timer = self._loop.call_later(timeout_s / _NUM_CHECKS, self._check, timeout_s)

    def _check(self, timeout_s: float) -> None:
        self._timer = None
        num_taken, is_waiting = self._progress()
        if not is_waiting:
            return
        self._num_idle = self._num_idle + 1 if num_taken == self._num_taken else 0
        self._num_taken = num_taken
        if self._num_idle < _NUM_CHECKS:
            self._check_later(timeout_s)
        else:
            self._on_stopped()
            self._abort()

    def _progress(self) -> tuple[int, bool]:
        """Bytes that the client has taken (a number that grows as it takes them), and whether there are more for it."""
        num_buffered = self._transport.get_write_buffer_size()
        if self._socket is not None and hasattr(socket, "TCP_INFO"):
            with suppress(*_GONE, struct.error):  # the last of an older kernel
                info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                num_unacked, num_taken, num_unsent = _TCP_INFO.unpack(info)
                return num_taken, bool(num_buffered or num_unacked or num_unsent)
        return self._num_written - num_buffered, num_buffered > 0

    def _abort(self) -> None:
        """With a reset: else the kernel would keep what is left, and try on."""
        if self._socket is not None:
            with suppress(*_GONE):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def _tcp_socket_of(transport: asyncio.Transport) -> socket.socket | None:
    sock: socket.socket | None = transport.get_extra_info("socket")
    return sock if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6) else None
