"""What stands around every route."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineDead, Overloaded, RequestError
from server.errors import BodyTooLarge
from server.middleware import AnswerErrors, LimitBody, RequestId

pytestmark = pytest.mark.anyio


async def call(
    app: ASGIApp, *, headers: dict[str, str] | None = None, body: tuple[bytes, ...] = (b"",), method: str = "POST"
) -> list[Message]:
    """What the app sends for one request, whose body comes in these pieces."""
    sent: list[Message] = []
    pieces = list(body)

    async def receive() -> Message:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": "/", "headers": raw, "state": {"request_id": "req_1"}}
    await app(scope, receive, send)
    return sent


def headers_of(sent: list[Message]) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}


async def show_id(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(Request(scope).state.request_id)(scope, receive, send)


@pytest.mark.parametrize("request_id", ["a", "3f2c-4", "x" * 128, "trace 1/2"])
async def test_a_clients_request_id_is_sent_back(request_id: str) -> None:
    sent = await call(RequestId(show_id), headers={"X-Request-Id": request_id})
    assert headers_of(sent)["x-request-id"] == request_id
    assert sent[1]["body"].decode() == request_id


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a\nb", "a\x00", "é", "a\x7f"])
async def test_one_that_is_not_fit_to_be_printed_is_replaced(request_id: str) -> None:
    sent = await call(RequestId(show_id), headers={"X-Request-Id": request_id})
    assert headers_of(sent)["x-request-id"].startswith("req_")
    assert sent[1]["body"].decode() == headers_of(sent)["x-request-id"]


async def test_without_one_each_request_gets_its_own() -> None:
    ids = {headers_of(await call(RequestId(show_id)))["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def raising(error: Exception, *, after: bool = False) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if after:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "method", "refused"),
    [
        (RequestError("m", code="invalid_value"), "POST", ["invalid_value"]),
        (Overloaded("m", retry_after_s=1), "POST", ["overloaded"]),
        (RequestError("m"), "GET", []),
        (EngineDead("m"), "POST", []),
        (ValueError("m"), "POST", []),
    ],
)
async def test_refused_requests_are_counted_faults_of_ours_are_not(
    error: Exception, method: str, refused: list[str]
) -> None:
    codes: list[str] = []
    sent = await call(AnswerErrors(raising(error), codes.append), method=method)
    assert codes == refused
    assert b'{"error":{"message":' in sent[1]["body"]


async def test_a_client_that_has_left_is_not_answered() -> None:
    assert await call(AnswerErrors(raising(ClientDisconnect()), print)) == []


async def test_an_error_after_the_first_byte_goes_on_to_the_server() -> None:
    with pytest.raises(ValueError, match="late"):
        await call(AnswerErrors(raising(ValueError("late"), after=True), print))


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(await Request(scope, receive).body())(scope, receive, send)


@pytest.mark.parametrize("body", [(b"12345",), (b"12", b"345"), (b"", b"")])
async def test_a_body_up_to_the_limit_is_read(body: tuple[bytes, ...]) -> None:
    assert (await call(LimitBody(echo, max_bytes=5), body=body))[1]["body"] == b"".join(body)


async def test_a_body_is_refused_when_it_has_become_too_long() -> None:
    with pytest.raises(BodyTooLarge, match="more than 5 bytes"):
        await call(LimitBody(echo, max_bytes=5), body=(b"123", b"456", b"not read"))


async def test_a_body_that_says_it_is_too_long_is_not_read() -> None:
    with pytest.raises(BodyTooLarge):
        await call(LimitBody(echo, max_bytes=5), headers={"Content-Length": "6"}, body=())


@pytest.mark.parametrize("said", ["", "five", "-1", "1e9"])
async def test_a_length_that_is_none_is_not_trusted(said: str) -> None:
    sent: Any = await call(LimitBody(echo, max_bytes=5), headers={"Content-Length": said}, body=(b"12345",))
    assert sent[1]["body"] == b"12345"


@pytest.mark.parametrize("middleware", [RequestId, LimitBody, lambda app: AnswerErrors(app, print)])
async def test_what_is_no_request_passes_through(middleware: Any) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    await middleware(app)({"type": "lifespan"}, None, None)
    assert seen == ["lifespan"]
