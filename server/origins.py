"""What browsers can be made to do: web pages that use the server of whoever looks at them.

No key protects a server on a loopback address, and any page can send it requests from within the machine. Two checks
stand against that; neither is met by a client that is no browser.

*Names.* A page of evil.example whose name comes to mean 127.0.0.1 (DNS rebinding) is of one origin with the server, and
could read its answers. Its requests still name evil.example as their host, which is not ours: `RequireKnownHost`. An
IP address as host cannot be rebound, and is always taken.

*Origins.* A page may send a POST to any server, so long as it is "simple" (text/plain, which we read as JSON too); the
browser hides the answer only. It also says whose page it is: `RequireKnownOrigin`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from config.schema import AccessConfig
from engine.errors import ConfigError
from server.auth import OPEN_PATHS
from server.errors import Forbidden

_DEFAULT_PORTS = {"http": "80", "https": "443"}
_SHOWN_LEN = 100
"""Characters of a name that are said back."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`. A name other than `localhost`: perhaps not."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def allowed_hosts(config: AccessConfig, host: str) -> frozenset[str]:
    """The names that a server listening on `host` answers to; see RequireKnownHost."""
    if config.allowed_hosts:
        return frozenset(name.lower().rstrip(".") for name in config.allowed_hosts)
    return frozenset() if is_loopback(host) else frozenset({"*"})


def allowed_origins(config: AccessConfig) -> frozenset[str]:
    """Other servers' pages that may use this one. Raises ConfigError for what is no origin."""
    for origin in config.cors_allow_origins:
        parts = urlsplit(origin)
        is_origin = bool(parts.netloc) and origin == f"{parts.scheme}://{parts.netloc}"
        if not is_origin and origin not in ("*", "null"):
            raise ConfigError(
                f"{origin} is no origin, and so would never match",
                setting="cors_allow_origins",
                hint="as in https://chat.example.com or http://localhost:3000, without a path or a slash at its end",
            )
    return frozenset(origin.lower() for origin in config.cors_allow_origins)


class RequireKnownHost:
    """ASGI middleware: refuses requests whose `Host` is a name that is not ours. Ports do not count."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """`names`: in lower case; `.example.com` is that and all below it, `*` is any. Addresses, localhost: always."""
        self._app = app
        self._names = frozenset(name for name in names if not name.startswith("."))
        self._suffixes = (".localhost", *(name for name in names if name.startswith(".")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and "*" not in self._names:
            for host in Headers(scope=scope).getlist("Host"):
                self._check(_without_port(host).lower().rstrip("."))
        await self._app(scope, receive, send)

    def _check(self, name: str) -> None:
        is_known = name in self._names or f".{name}".endswith(self._suffixes) or _address(name.strip("[]")) is not None
        if not is_known:
            shown = name[:_SHOWN_LEN]
            message = f"this server does not answer to the name {shown!r}; if it is its own: --allowed-hosts {shown}"
            raise Forbidden(message, code="host_not_allowed")


class RequireKnownOrigin:
    """ASGI middleware: refuses requests that another server's web page sends, but for those that are allowed to."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        """`origins`: in lower case; `*` allows all."""
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "*" not in self._origins:
            headers = Headers(scope=scope)
            for origin in headers.getlist("Origin"):
                self._check(origin, headers.get("Host", ""))
        await self._app(scope, receive, send)

    def _check(self, origin: str, host: str) -> None:
        if origin.lower() not in self._origins and not _is_same(origin, host):
            shown = origin[:_SHOWN_LEN]
            message = f"web pages of {shown!r} may not use this server; to let them: --cors-allow-origins {shown}"
            raise Forbidden(message)


def _is_same(origin: str, host: str) -> bool:
    """Whether the page is of the server that it asks. A proxy may have taken the TLS off: the scheme does not count."""
    scheme, _, authority = origin.lower().partition("://")
    port = ":" + _DEFAULT_PORTS.get(scheme, "")
    return bool(authority) and authority.removesuffix(port) == host.lower().removesuffix(port)


def _without_port(host: str) -> str:
    """`[::1]` of `[::1]:8000`."""
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdecimal() or not port) else host


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
