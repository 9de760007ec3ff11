"""One log line for each request, when it has ended: what was asked, how it ended, how long that took, how many tokens.

    POST /v1/chat/completions 200 in 0.512 s, queued 0.002 s, first token 0.061 s, 38 + 64 tokens (32 cached), length

A response in the background has two: of the request, which is answered at once, and of its own end.
As JSON (`--log-format json`) each of these is a member. Never a query string (people put keys there), never a prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

_UNLOGGED = frozenset({"/live", "/ready", "/health", "/metrics"})
_CLIENT_LEFT = 499
"""Status in the log, as nginx has it, of a request whose client left before the answer."""
_MAX_PATH_LEN = 200


@dataclass(frozen=True, slots=True)
class Generated:
    """What a generating request came to, as far as it got. Times are time.monotonic()."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float | None
    """Seconds before it began to run; of the first of its choices."""
    first_token_s: float | None
    """When the first token came."""
    finish_reasons: tuple[str, ...]
    """Of the choices that have ended."""


class LogRequests:
    """ASGI middleware. A route that generates puts a function into the state, as `report`: it gives the `Generated`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNLOGGED:
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        status = _CLIENT_LEFT
        is_whole = False

        async def watched_send(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            _log(scope, began_s, status, is_whole=is_whole)


def log_background(response_id: str, began_s: float, generated: Generated) -> None:
    """The line of a response that nobody waited for, at its end; `began_s` is time.monotonic() at its request."""
    fields = {
        "response": response_id,
        "complete": bool(generated.finish_reasons),
        "total_s": round(time.monotonic() - began_s, 6),
        **_generated(generated, began_s),
    }
    logger.info("%s", _line(f"background response {response_id}", fields), extra={"fields": fields})


def _log(scope: Scope, began_s: float, status: int, *, is_whole: bool) -> None:
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": quote(scope["path"])[:_MAX_PATH_LEN],
        "client": scope["client"][0] if scope.get("client") else None,
        "status": status,
        "complete": is_whole,
        "total_s": round(time.monotonic() - began_s, 6),
    }
    report = scope.get("state", {}).get("report")
    if report is not None:
        fields |= _generated(report(), began_s)
    logger.info("%s", _line(f"{fields['method']} {fields['path']} {status}", fields), extra={"fields": fields})


def _generated(generated: Generated, began_s: float) -> dict[str, Any]:
    first_token_s = generated.first_token_s
    return {
        "queue_s": None if generated.queue_s is None else round(generated.queue_s, 6),
        "ttft_s": None if first_token_s is None else round(first_token_s - began_s, 6),
        "prompt_tokens": generated.num_prompt_tokens,
        "cached_tokens": generated.num_cached_tokens,
        "output_tokens": generated.num_output_tokens,
        "finish_reasons": generated.finish_reasons,
    }


def _line(what: str, fields: Mapping[str, Any]) -> str:
    """The same for people; `what` has ended."""
    parts = [f"{what} in {fields['total_s']:.3f} s"]
    if not fields["complete"]:
        parts[0] += " (cut off)"
    if "prompt_tokens" in fields:
        for name, label in (("queue_s", "queued"), ("ttft_s", "first token")):
            if fields[name] is not None:
                parts.append(f"{label} {fields[name]:.3f} s")
        tokens = f"{fields['prompt_tokens']} + {fields['output_tokens']} tokens"
        parts.append(f"{tokens} ({fields['cached_tokens']} cached)")
        parts.extend(dict.fromkeys(fields["finish_reasons"]))
    return ", ".join(parts)
