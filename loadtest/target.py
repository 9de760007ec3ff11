"""Target: the server under load."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    tls: bool = False
    path: str = ""
    """What comes before `/v1`; no slash at its end."""
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, *, api_key: str | None = None) -> Target:
        """Read `http[s]://host[:port][/path]`; a `/v1` at the end, as in an SDK's `base_url`, may stay.

        Raises ValueError when it is no such URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, path, api_key)

    @property
    def is_loopback(self) -> bool:
        """Whether it is this machine by name. A name that merely resolves to it does not count."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def authority(self) -> str:
        """`host:port`, as in the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL again, without the key."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"
