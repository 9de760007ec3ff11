"""One log line for each request, when it has ended: what was asked, how it ended, how long that took, how many tokens.

    POST /v1/chat/completions 200 in 0.512 s, queued 0.002 s, first token 0.061 s, 38 + 64 tokens (32 cached), length

A response in the background has two: of the request, which is answered at once, and of its own end.
As JSON (`--log-format json`) each of these is a member. Never a query string (people put keys there), never a prompt.

The line is made of a record, `Ended`, which is then in the request's state: `tracing` makes a span of the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.output import Chunk
from engine.params import SamplingParams
from server.errors import Row

logger = logging.getLogger(__name__)

_UNLOGGED = frozenset({"/live", "/ready", "/health", "/metrics"})
_CLIENT_LEFT = 499
"""Status in the log, as nginx has it, of a request whose client left before the answer."""
_MAX_PATH_LEN = 200


@dataclass(slots=True)
class Times:
    """When the output of a generating request came to its reader, as far as it has come (time.monotonic())."""

    queue_s: float | None = None
    """Seconds before it began to run; of the first of its choices that spoke."""
    first_scheduled_s: float | None = None
    """When it began to run."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    """When the last of the choices that have ended did."""

    def note(self, chunk: Chunk) -> None:
        """Take in a chunk. Those between the first token and the end of a choice need not come."""
        if self.queue_s is None:
            self.queue_s, self.first_scheduled_s = chunk.queue_s, chunk.first_scheduled_s
        if self.first_token_s is None and chunk.token_ids:
            self.first_token_s = time.monotonic()
        if chunk.finish_reason is not None:
            self.last_token_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class Generated:
    """What a generating request asked for, and what it came to, as far as it got."""

    response_id: str
    params: SamplingParams
    """Of its first choice."""
    num_choices: int
    """For each prompt."""
    is_stream: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    times: Times
    finish_reasons: tuple[str, ...]
    """Of the choices that have ended."""
    failure: Row | None
    """Of the error that ended it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended, or a response in the background. Times are time.monotonic()."""

    began_s: float
    ended_s: float
    status: int | None
    """That was sent, if one was."""
    is_whole: bool
    """The answer was sent to its end."""
    generated: Generated | None
    """None if it came to no generating."""
    failure: Row | None
    """Of the error that it was answered with, before or within the answer."""


class Trace(Protocol):
    """The span of a request: `scope["state"]["trace"]`, if traces are made of them."""

    ids: Mapping[str, str]
    """For log lines."""

    def add_background(self, ended: Ended) -> None:
        """Make a span of a response that the request has left to the background."""


class LogRequests:
    """ASGI middleware. A route that generates puts a function into the state, as `report`: it gives the `Generated`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNLOGGED:
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        status: int | None = None
        is_whole = False

        async def watched_send(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        state = scope.setdefault("state", {})
        try:
            await self._app(scope, receive, watched_send)
        finally:
            report = state.get("report")
            generated = None if report is None else report()
            failure = state.get("failure") or (generated and generated.failure)
            ended = Ended(began_s, time.monotonic(), status, is_whole, generated, failure)
            state["ended"] = ended
            _log_request(scope, ended)


def log_background(state: Mapping[str, Any], began_s: float, generated: Generated) -> None:
    """The line of a response that nobody waited for, at its end, and its span.

    `state` is that of the request, which came at `began_s`, time.monotonic().
    """
    is_whole = bool(generated.finish_reasons)
    ended = Ended(began_s, time.monotonic(), None, is_whole, generated, generated.failure)
    trace: Trace | None = state.get("trace")
    fields = {"response": generated.response_id, **_fields(ended, trace)}
    logger.info("%s", _line(f"background response {generated.response_id}", fields), extra={"fields": fields})
    if trace is not None:
        trace.add_background(ended)


def _log_request(scope: Scope, ended: Ended) -> None:
    status = ended.status or _CLIENT_LEFT
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": quote(scope["path"])[:_MAX_PATH_LEN],
        "client": scope["client"][0] if scope.get("client") else None,
        "status": status,
        **_fields(ended, scope["state"].get("trace")),
    }
    logger.info("%s", _line(f"{fields['method']} {fields['path']} {status}", fields), extra={"fields": fields})


def _fields(ended: Ended, trace: Trace | None) -> dict[str, Any]:
    """What both lines have."""
    fields: dict[str, Any] = {"complete": ended.is_whole, "total_s": round(ended.ended_s - ended.began_s, 6)}
    if ended.generated is not None:
        fields |= _generated(ended.generated, ended.began_s)
    if ended.failure is not None:
        fields["error"] = ended.failure.code
    if trace is not None:
        fields |= trace.ids
    return fields


def _generated(generated: Generated, began_s: float) -> dict[str, Any]:
    times = generated.times
    return {
        "queue_s": None if times.queue_s is None else round(times.queue_s, 6),
        "ttft_s": None if times.first_token_s is None else round(times.first_token_s - began_s, 6),
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
    if "error" in fields:
        parts.append(fields["error"])
    if "trace_id" in fields:
        parts.append(f"trace {fields['trace_id']}")
    return ", ".join(parts)
