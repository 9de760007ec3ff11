"""API keys: who may ask. Checked before anything of the body is read."""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from config.schema import AccessConfig
from engine.errors import ConfigError
from server.errors import Unauthorized

OPEN_PATHS = frozenset({"/live", "/ready", "/health"})
"""Orchestrators probe these, and have no key."""

_MOUNTED_SECRETS = Path("/run/secrets")
"""Container runtimes put files here, with modes of theirs, and no other user is there to read them."""


def load_keys(config: AccessConfig) -> tuple[str, ...]:
    """All keys that are set, in the settings and in the key file; none: everyone may ask.

    Raises ConfigError for a file that cannot be read or has no keys in it: to serve everyone then would be no surprise
    one wants.
    """
    keys = [key for key in config.api_key if key]  # an empty variable is how compose files leave one out
    if config.api_key_file is not None:
        keys += _read_keys(config.api_key_file)
    return tuple(keys)


def key_file_warnings(config: AccessConfig) -> list[str]:
    """What an operator should know of the key file, which can be read: that others than its owner can read it too."""
    if config.api_key_file is None:
        return []
    path = Path(config.api_key_file).expanduser()
    if _MOUNTED_SECRETS in path.parents or not path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        return []
    return [f"every user of this machine can read the API keys in {path}: chmod o-rwx {path}"]


def _read_keys(path: str) -> list[str]:
    try:
        text = Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error}", setting="api_key_file") from error
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        hint = "put one key on a line, or leave the setting out to serve everyone"
        raise ConfigError(f"the API key file {path} has no keys in it", setting="api_key_file", hint=hint)
    return keys


class RequireKey:
    """ASGI middleware: lets requests with `Authorization: Bearer KEY` through, and all to `OPEN_PATHS`.

    Keys are compared as digests, all of them each time: how long that takes says nothing of any key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        """The request's state gets `key_id`: which key it was, in 16 characters that do not tell the key."""
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scope.setdefault("state", {})["key_id"] = self._check(Headers(scope=scope).get("Authorization"))
        await self._app(scope, receive, send)

    def _check(self, header: str | None) -> str:
        if header is None:
            raise Unauthorized("this server needs an API key: send the header Authorization: Bearer KEY")
        scheme, _, key = header.partition(" ")
        digest = _digest(key.strip().encode("latin-1"))  # the bytes that came
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized("this API key is not known here")
        return hashlib.sha256(digest).hexdigest()[:16]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
