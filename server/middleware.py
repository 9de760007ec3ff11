"""What happens to every request around its route. Plain ASGI, since an event of a stream passes through all of it.

Outermost first (those of other modules in brackets; CORS only if other origins are allowed, TellAllowance if there are
rate limits, keys if there are any):
(CountResponses) > RequestId > (TraceRequests) > (LogRequests) > (CORSMiddleware) > (TellAllowance, of ratelimits)
> AnswerErrors > RefuseUnfit > (RequireKnownHost > RequireKnownOrigin, of origins) > (RequireKey, of auth) > LimitBody
> TimeBody > (ReleaseHeld, of admission) > the routes
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import BodyTooLarge, BodyTooSlow, row_of, to_api_error
from server.limits import MAX_BODY_BYTES, MAX_REQUEST_ID_LEN
from server.logs import REQUEST_ID

_HEADER = "X-Request-Id"


class RequestId:
    """Gives each request an id, for logs and for the client: the client's own if it is fit to be printed.

    It is `scope["state"]["request_id"]`, and is sent back. It is a label, never a key: two requests may have the same.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_HEADER, "")
        request_id = given if _is_fit(given) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        token = REQUEST_ID.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(token)


def _is_fit(request_id: str) -> bool:
    return 0 < len(request_id) <= MAX_REQUEST_ID_LEN and request_id.isascii() and request_id.isprintable()


class AnswerErrors:
    """Answers whatever was raised before the first byte with the one error body."""

    def __init__(self, app: ASGIApp, on_refused: Callable[[str], None]) -> None:
        """`on_refused` is called with the error's code for each POST that is refused: not for faults of ours."""
        self._app = app
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return  # nobody to answer
        except Exception as error:
            scope["state"]["failure"] = row_of(error)  # for the log
            if has_begun:
                raise  # uvicorn logs it and closes the connection, so that the client sees that something is missing
            api_error = to_api_error(error, request_id=scope["state"]["request_id"])
            if scope["method"] == "POST" and api_error.status != 500:
                self._on_refused(api_error.code or "other")
            await api_error.response()(scope, receive, send)


class RefuseUnfit:
    """Raises what the connection has found wrong with a request: `state["unfit"]`, there from the start or later."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]

        async def checked_receive() -> Message:
            message = await receive()
            if "unfit" in state:
                raise state["unfit"]
            return message

        if "unfit" in state:
            raise state["unfit"]
        await self._app(scope, checked_receive, send)


class LimitBody:
    """Refuses bodies that are too long: by what they say of themselves, and by what comes."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = Headers(scope=scope).get("Content-Length", "")
        if said.isdecimal() and int(said) > self._max_bytes:
            raise self._too_large()
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counting_receive, send)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body has more than {self._max_bytes} bytes, which is the most that is read")


class TimeBody:
    """Refuses bodies that do not come. What counts is the time spent waiting: not that in which nobody reads."""

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        left_s = self._timeout_s
        is_whole = False

        async def timed_receive() -> Message:
            nonlocal left_s, is_whole
            if is_whole:  # what comes now is the client's leaving, which may take as long as the answer does
                return await receive()
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            try:
                async with asyncio.timeout(left_s):
                    message = await receive()
            except TimeoutError:
                raise BodyTooSlow(f"the body did not come within {self._timeout_s:g} s") from None
            left_s -= loop.time() - began_s
            is_whole = not message.get("more_body", False)
            return message

        await self._app(scope, timed_receive, send)
