"""Errors as clients see them: one table from what was raised to a status, one body for all of them.

Whatever is raised while a request is answered ends here, by way of `middleware.AnswerErrors` before the first byte
and of `sse.EventStream` after it. The text of an unforeseen error goes to the log, never to a client.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from engine.errors import DeadlineExceeded, EngineDead, EngineError, EngineStopped, Overloaded, RequestError
from server.heads import HeadTooLarge, InvalidHttp, UnfitRequest, UrlTooLong

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}")
"""Where something lies in memory, as Python says of an object: errors of templates and grammars are others' words."""

_RETRY_AFTER_DEAD_S = 5  # a supervisor starts the process anew, or a balancer has another


class ServerRefusal(Exception):
    """The server refuses a request, before the engine sees it. The subclass says which row of `STATUS_TABLE`."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Unauthorized(ServerRefusal):
    """No API key, or a wrong one."""


class Forbidden(ServerRefusal):
    """From where it was asked, this may not be asked."""


class ModelNotFound(ServerRefusal):
    """Another model was asked for than the one that is served."""


class ResponseNotFound(ServerRefusal):
    """No such response is kept, or it is another API key's."""


class BodyTooSlow(ServerRefusal):
    """The body takes longer to come than the limit."""


class BodyTooLarge(ServerRefusal):
    """The body is longer than the limit."""


class TooManyRequests(ServerRefusal):
    """The client is to ask less, or later: after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestRateExceeded(TooManyRequests):
    """The client has had its requests of this minute."""


class TokenRateExceeded(ServerRefusal):
    """The client has had its tokens of this minute; `retry_after_s` is None if no minute has as many."""

    def __init__(self, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(ServerRefusal):
    """The server cannot do its work now."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind of error is answered."""

    status: int
    type: str
    code: str | None
    """Used where the error has no code of its own."""


STATUS_TABLE: Mapping[type[Exception], Row] = {
    RequestError: Row(400, "invalid_request_error", "invalid_value"),
    InvalidHttp: Row(400, "invalid_request_error", "invalid_http"),
    Unauthorized: Row(401, "invalid_request_error", "invalid_api_key"),
    Forbidden: Row(403, "invalid_request_error", "origin_not_allowed"),
    ModelNotFound: Row(404, "invalid_request_error", "model_not_found"),
    ResponseNotFound: Row(404, "invalid_request_error", "response_not_found"),
    BodyTooSlow: Row(408, "invalid_request_error", "request_timeout"),
    BodyTooLarge: Row(413, "invalid_request_error", "request_too_large"),
    UrlTooLong: Row(414, "invalid_request_error", "url_too_long"),
    TooManyRequests: Row(429, "rate_limit_error", "rate_limit_exceeded"),
    RequestRateExceeded: Row(429, "requests", "rate_limit_exceeded"),
    TokenRateExceeded: Row(429, "tokens", "rate_limit_exceeded"),
    HeadTooLarge: Row(431, "invalid_request_error", "headers_too_large"),
    Unavailable: Row(503, "service_unavailable", "unavailable"),
    Overloaded: Row(503, "service_unavailable", "overloaded"),
    EngineStopped: Row(503, "service_unavailable", "stopping"),  # as `gate` says to those that come later
    DeadlineExceeded: Row(504, "timeout_error", "deadline_exceeded"),
    EngineDead: Row(500, "server_error", "engine_dead"),
    EngineError: Row(500, "server_error", "engine_error"),
    Exception: Row(500, "server_error", "internal_error"),
}
"""The most derived class that fits counts. What the router raises (no such route, wrong method) is `routing_error`."""


def row_of(error: Exception) -> Row:
    """How `error` is answered: its row, with the error's own code if it has one."""
    kind = _kind(error)
    row = STATUS_TABLE[kind]
    if kind is Exception:  # a code that it has means something else
        return row
    return replace(row, code=getattr(error, "code", None) or row.code)


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error, ready to be sent."""

    status: int
    message: str
    type: str
    code: str | None
    param: str | None = None
    headers: Mapping[str, str] | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The envelope: `protocol.errors.ErrorEnvelope`."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def json(self) -> str:
        """The envelope as one line."""
        return json.dumps(self.body)

    def response(self) -> Response:
        """The envelope as a whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


def to_api_error(error: Exception, *, request_id: str = "") -> ApiError:
    """What a client is told of `error`. Logs those that nobody foresaw."""
    row = row_of(error)
    if _kind(error) is Exception:
        logger.error("request %s failed", request_id, exc_info=error)
        message = f"The server failed to answer this request. Its log says more, under request id {request_id}."
        return ApiError(row.status, message, row.type, row.code)
    return ApiError(
        row.status,
        _ADDRESS.sub("", str(error)),
        row.type,
        row.code,
        getattr(error, "param", None),
        _headers(error),
    )


def _kind(error: Exception) -> type[Exception]:
    return next(kind for kind in type(error).__mro__ if kind in STATUS_TABLE)


def routing_error(error: HTTPException, method: str, path: str) -> ApiError:
    """What a client is told of an error that the router raised: no such route, or not with this method."""
    message, code = error.detail, None
    if error.status_code == 404:
        message, code = f"There is no {method} {path}. The routes are described at /docs.", "unknown_url"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message, code = f"{method} {path} is not possible: use {allowed}.", "method_not_allowed"
    return ApiError(error.status_code, message, "invalid_request_error", code, headers=error.headers)


def _headers(error: Exception) -> dict[str, str] | None:
    if (after_s := getattr(error, "retry_after_s", None)) is not None:
        # OpenAI's SDKs read the second one first, and so come back neither too soon nor late.
        return {"Retry-After": str(math.ceil(after_s)), "Retry-After-Ms": str(math.ceil(after_s * 1000))}
    if isinstance(error, DeadlineExceeded | TokenRateExceeded):
        return {"X-Should-Retry": "false"}  # OpenAI's SDK would ask twice more: in vain
    if isinstance(error, EngineDead):
        return {"Retry-After": str(_RETRY_AFTER_DEAD_S)}
    if isinstance(error, BodyTooSlow | BodyTooLarge | UnfitRequest):
        return {"Connection": "close"}  # the rest is not wanted
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    return None
