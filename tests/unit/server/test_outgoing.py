"""When a client that does not read is cut off: check by check, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import uvloop

from server.outgoing import Outgoing

TIMEOUT_S = 8.0


class Clock:
    """An event loop, as far as it is one here: of one timer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: tuple[float, Callable[[], None]] | None = None

    def call_later(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> Any:
        assert self._due is None
        self._due = (self.now_s + delay_s, lambda: function(*arguments))
        return self

    def cancel(self) -> None:
        self._due = None

    @property
    def is_idle(self) -> bool:
        return self._due is None

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._due is not None and self._due[0] <= end_s:
            (due_s, function), self._due = self._due, None
            self.now_s = max(self.now_s, due_s)
            function()
        self.now_s = max(self.now_s, end_s)


class FakeTransport(asyncio.Transport):
    """Keeps what is written until the test takes it away."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        super().__init__({"socket": sock})
        self.num_buffered = 0
        self.aborted = 0

    def write(self, data: Any) -> None:
        self.num_buffered += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_buffered

    def abort(self) -> None:
        self.aborted += 1
        self.num_buffered = 0


def make(transport: FakeTransport, timeout_s: float | None = TIMEOUT_S) -> tuple[Outgoing, Clock, list[str]]:
    """With a clock, and a list of the calls that it makes."""
    clock = Clock()
    calls: list[str] = []
    outgoing = Outgoing(
        transport,
        timeout_s,
        cast(asyncio.AbstractEventLoop, clock),
        on_close=lambda: calls.append("close"),
        on_stopped=lambda: calls.append("stopped"),
    )
    return outgoing, clock, calls


def test_one_that_takes_nothing_is_cut_off_once() -> None:
    transport = FakeTransport()
    outgoing, clock, calls = make(transport)
    outgoing.write(b"x" * 100)
    clock.advance(TIMEOUT_S)
    assert calls == []
    clock.advance(TIMEOUT_S / 2)
    assert (calls, transport.aborted, clock.is_idle) == (["stopped"], 1, True)


def test_one_that_takes_a_byte_now_and_then_is_not() -> None:
    transport = FakeTransport()
    outgoing, clock, calls = make(transport)
    outgoing.write(b"x" * 20)
    for _ in range(20):
        clock.advance(TIMEOUT_S * 0.9)
        transport.num_buffered -= 1
    assert calls == []
    clock.advance(TIMEOUT_S)
    assert clock.is_idle  # it has all: nothing is looked at until more is written
    outgoing.write(b"x")
    clock.advance(2 * TIMEOUT_S)
    assert calls == ["stopped"]


def test_what_is_written_meanwhile_is_not_taken_for_read() -> None:
    outgoing, clock, calls = make(FakeTransport())
    for _ in range(10):
        outgoing.write(b": keep-alive\n\n")
        clock.advance(TIMEOUT_S / 5)
    assert calls == ["stopped"]


def test_time_in_which_nobody_looked_does_not_count() -> None:
    transport = FakeTransport()
    outgoing, clock, calls = make(transport)
    outgoing.write(b"x" * 100)
    clock.advance(TIMEOUT_S / 2)
    clock.now_s += 1000 * TIMEOUT_S  # the process stood still; the timer fires late
    clock.advance(0)
    assert calls == []
    transport.num_buffered -= 1
    clock.advance(TIMEOUT_S)
    assert calls == []


def test_without_a_limit_nothing_is_looked_at() -> None:
    outgoing, clock, _ = make(FakeTransport(), None)
    outgoing.write(b"x")
    assert clock.is_idle


def test_a_connection_that_has_gone_is_forgotten() -> None:
    outgoing, clock, calls = make(FakeTransport())
    outgoing.write(b"x")
    outgoing.forget()
    clock.advance(10 * TIMEOUT_S)
    assert calls == []


def test_closing_is_left_to_the_connection() -> None:
    transport = FakeTransport()
    outgoing, _, calls = make(transport)
    outgoing.close()
    assert calls == ["close"]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A server's socket and its client's, which takes little that it does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        with listener.accept()[0] as sock:
            sock.setblocking(False)
            yield sock, client


def fill(sock: socket.socket) -> int:
    """Send until the kernel takes no more; how much it took."""
    num_sent = 0
    try:
        while True:
            num_sent += sock.send(b"x" * 1024)
    except BlockingIOError:
        return num_sent


def test_the_kernel_keeps_little_of_what_nobody_reads(pair: tuple[socket.socket, socket.socket]) -> None:
    sock, _ = pair
    make(FakeTransport(sock))
    assert fill(sock) < 512 * 1024  # by default it is 4 MB


def test_what_the_clients_kernel_takes_counts_whatever_the_buffer_does(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """As with TLS, whose buffer is not the one that waits."""
    sock, client = pair
    transport = FakeTransport(sock)
    outgoing, clock, calls = make(transport)
    outgoing.write(b"")
    num_left = fill(sock)
    for _ in range(8):
        clock.advance(TIMEOUT_S * 0.9)
        for _ in range(4):
            num_left -= len(client.recv(4096))
        assert not outgoing.is_read()
    assert calls == []
    clock.advance(1.5 * TIMEOUT_S)
    assert calls == ["stopped"]
    assert num_left > 0


async def closed_socket() -> Any:
    """That of a connection which the running event loop has closed, as its transport gave it."""
    loop = asyncio.get_running_loop()
    lost = loop.create_future()
    protocol: Any = type("Protocol", (asyncio.Protocol,), {"connection_lost": lambda _, error: lost.set_result(error)})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        transport, _ = await loop.create_connection(protocol, *listener.getsockname())
        sock = transport.get_extra_info("socket")
        transport.abort()
        await lost
    return sock


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_socket_closed_under_it_has_nothing_to_wait_for(run: Callable[..., Any]) -> None:
    """Under TLS the socket is closed before the connection hears of it."""
    outgoing, clock, calls = make(transport := FakeTransport(run(closed_socket())))
    outgoing.write(b"x")
    transport.num_buffered = 0
    assert outgoing.is_read()
    clock.advance(10 * TIMEOUT_S)
    assert (calls, clock.is_idle) == ([], True)
    outgoing.write(b"what a transport keeps that has not heard of it either")
    clock.advance(10 * TIMEOUT_S)
    assert (calls, transport.aborted) == (["stopped"], 1)


def test_what_the_client_has_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    """Whether it has read it is its own affair."""
    sock, _ = pair
    outgoing, clock, calls = make(FakeTransport(sock))
    outgoing.write(b"")
    sock.send(b"x" * 100)
    clock.advance(10 * TIMEOUT_S)
    assert outgoing.is_read()
    assert (calls, clock.is_idle) == ([], True)
