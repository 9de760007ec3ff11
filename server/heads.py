"""Heads of requests: how large one may be, and what is none.

httptools parses in C and sets no bounds: a header that does not end grows in it for as long as its bytes come, and
each that ends is kept. Nor does it say much of what it cannot parse. It is strict, though: what two servers may read
in two ways, so that one of them sees a request that the other did not (smuggling), it refuses; the rest is here.
"""

from __future__ import annotations

from collections.abc import Sequence

import httptools

from server.limits import MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES

_LINE_BYTES = 4
"""Of a header, beside its name and its value: a colon, a space, the end of the line."""

_TLS_HANDSHAKE = b"\x16\x03"
_HTTP_2 = "Pause on PRI/Upgrade"


class UnfitRequest(Exception):
    """What has come is no request that may be answered, and where the next one begins cannot be known."""


class InvalidHttp(UnfitRequest):
    """It is not HTTP, or not as it should be."""


class UrlTooLong(UnfitRequest):
    """Its URL is longer than the limit."""


class HeadTooLarge(UnfitRequest):
    """Its headers are more than the limit, in number or in bytes; trailers count as well."""


class HeadBounds:
    """Counts what comes of one request's head, and raises when it is too much.

    What the parser has handed over is counted exactly. What it still keeps (a header that has not ended) is at most
    the bytes that came since it last handed something over, give or take one read from the socket.
    """

    def __init__(self) -> None:
        self.is_open = False
        """Whether a head has begun and has not ended."""
        self._num_url_bytes = 0
        self._num_bytes = 0
        self._num_headers = 0
        self._num_kept = 0
        self._has_moved = False

    def begin(self) -> None:
        """A request begins."""
        self.is_open = True
        self._num_url_bytes = self._num_bytes = self._num_headers = 0
        self.move()

    def end(self) -> None:
        """Its head is there."""
        self.is_open = False
        self.move()

    def move(self) -> None:
        """The parser has handed something over."""
        self._has_moved = True

    def add_url(self, part: bytes) -> None:
        """Some of the URL. Raises UrlTooLong."""
        self.move()
        self._num_url_bytes += len(part)
        if self._num_url_bytes > MAX_URL_BYTES:
            raise UrlTooLong(f"the URL has more than {MAX_URL_BYTES} bytes")

    def add_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer. Raises HeadTooLarge."""
        self.move()
        self._num_headers += 1
        self._num_bytes += len(name) + len(value) + _LINE_BYTES
        if self._num_headers > MAX_HEADERS:
            raise HeadTooLarge(f"the request has more than {MAX_HEADERS} headers")
        self._check(self._num_bytes)

    def add_read(self, num_bytes: int) -> None:
        """So many bytes have come, and were parsed. Raises HeadTooLarge."""
        self._num_kept = 0 if self._has_moved else self._num_kept + num_bytes
        self._has_moved = False
        self._check(self._num_bytes + self._num_kept)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge(f"the headers have more than {MAX_HEAD_BYTES} bytes")


def check_head(method: bytes, url: bytes, http_version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise InvalidHttp for a head that parses and is not fit all the same. `headers` with names in lower case."""
    if http_version not in ("1.0", "1.1"):
        raise InvalidHttp(f"this server speaks HTTP/1.1, and HTTP/{http_version} was spoken to it")
    if method == b"CONNECT":
        raise InvalidHttp("CONNECT is for proxies, and this is none")
    try:
        path = httptools.parse_url(url).path
    except httptools.HttpParserInvalidURLError:
        path = None
    if path is None:
        raise InvalidHttp("the first line has no path")
    num_hosts = sum(name == b"host" for name, _ in headers)
    if num_hosts > 1 or (num_hosts == 0 and http_version == "1.1"):
        raise InvalidHttp(f"the request has {num_hosts or 'no'} Host headers: it needs one")
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and (http_version != "1.1" or codings[0].strip().lower() != b"chunked"):
        raise InvalidHttp("a body may come chunked in HTTP/1.1, and with no other Transfer-Encoding")


def what_is_wrong(error: httptools.HttpParserError, data: bytes, *, is_first: bool) -> InvalidHttp:
    """What to tell a client that sent what cannot be parsed. `is_first`: with the first `data` that came."""
    reason = str(error)
    if is_first and data.startswith(_TLS_HANDSHAKE):
        return InvalidHttp(
            "this port speaks HTTP, and HTTPS was spoken to it: use http:// in the URL. (The server speaks HTTPS when "
            "it is started with --ssl-certfile and --ssl-keyfile.)"
        )
    if reason == _HTTP_2:
        return InvalidHttp("this server speaks HTTP/1.1, and HTTP/2 was spoken to it")
    if is_first and isinstance(error, httptools.HttpParserInvalidMethodError):
        return InvalidHttp("this port speaks HTTP, and what was sent to it begins as nothing that HTTP knows")
    return InvalidHttp(f"what was sent is not HTTP/1.1 as it should be: {reason}")
