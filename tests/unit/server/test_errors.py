"""Errors as clients see them."""

from __future__ import annotations

import pytest
from starlette.exceptions import HTTPException

from engine.errors import DeadlineExceeded, EngineDead, EngineError, EngineStopped, ModelError, Overloaded, RequestError
from server.errors import (
    STATUS_TABLE,
    BodyTooLarge,
    ModelNotFound,
    RequestRateExceeded,
    TokenRateExceeded,
    Unauthorized,
    Unavailable,
    routing_error,
    to_api_error,
)
from server.protocol.errors import ErrorEnvelope


@pytest.mark.parametrize(
    ("error", "status", "type_", "code", "param"),
    [
        (RequestError("m"), 400, "invalid_request_error", "invalid_value", None),
        (RequestError("m", param="n", code="c"), 400, "invalid_request_error", "c", "n"),
        (Unauthorized("m"), 401, "invalid_request_error", "invalid_api_key", None),
        (ModelNotFound("m", param="model"), 404, "invalid_request_error", "model_not_found", "model"),
        (BodyTooLarge("m"), 413, "invalid_request_error", "request_too_large", None),
        (RequestRateExceeded("m", retry_after_s=1), 429, "requests", "rate_limit_exceeded", None),
        (TokenRateExceeded("m", retry_after_s=1), 429, "tokens", "rate_limit_exceeded", None),
        (TokenRateExceeded("m", retry_after_s=None), 429, "tokens", "rate_limit_exceeded", None),
        (Unavailable("m"), 503, "service_unavailable", "unavailable", None),
        (Overloaded("m", retry_after_s=1), 503, "service_unavailable", "overloaded", None),
        (DeadlineExceeded("m"), 504, "timeout_error", "deadline_exceeded", None),
        (EngineDead("m"), 500, "server_error", "engine_dead", None),
        (EngineStopped("m"), 503, "service_unavailable", "stopping", None),
        (EngineError("m"), 500, "server_error", "engine_error", None),
        (ModelError("m"), 500, "server_error", "engine_error", None),
    ],
)
def test_errors_on_purpose_say_what_they_say(
    error: Exception, status: int, type_: str, code: str, param: str | None
) -> None:
    api_error = to_api_error(error)
    assert api_error.status == api_error.response().status_code == status
    assert api_error.body == {"error": {"message": "m", "type": type_, "param": param, "code": code}}
    ErrorEnvelope.model_validate_json(api_error.json())


def test_an_unforeseen_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    error = to_api_error(KeyError("a secret"), request_id="req_1")
    assert (error.status, error.code) == (500, "internal_error")
    assert "req_1" in error.message
    assert "secret" not in error.message
    assert "a secret" in caplog.text
    assert "req_1" in caplog.text


def test_when_to_come_back() -> None:
    assert to_api_error(Overloaded("m", retry_after_s=2.1)).response().headers["Retry-After"] == "3"
    for error in (RequestRateExceeded("m", retry_after_s=2.1), TokenRateExceeded("m", retry_after_s=2.1)):
        headers = to_api_error(error).response().headers
        assert (headers["Retry-After"], headers["Retry-After-Ms"]) == ("3", "2100")
    for dead in (EngineDead("m"), EngineStopped("m")):
        assert int(to_api_error(dead).response().headers["Retry-After"]) > 0


def test_nobody_need_ask_again_whose_time_is_over() -> None:
    assert to_api_error(DeadlineExceeded("m")).response().headers["X-Should-Retry"] == "false"


def test_how_to_authenticate() -> None:
    assert to_api_error(Unauthorized("m")).response().headers["WWW-Authenticate"] == "Bearer"


def test_the_routers_errors_say_what_would_be_right() -> None:
    assert routing_error(HTTPException(404), "GET", "/v2").message.startswith("There is no GET /v2.")
    error = routing_error(HTTPException(405, headers={"Allow": "POST"}), "GET", "/v1/completions")
    assert error.message == "GET /v1/completions is not possible: use POST."
    assert error.response().headers["Allow"] == "POST"
    assert routing_error(HTTPException(418, "teapot"), "GET", "/").message == "teapot"


def test_the_table_ends_with_everything() -> None:
    assert list(STATUS_TABLE)[-1] is Exception
