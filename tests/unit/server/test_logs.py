"""Log lines: whose, and whose not."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from server.logs import REQUEST_ID, LimitRepeats, configure_logging


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    names = ("", "uvicorn.error", "uvicorn.access", "httpx", "httpcore", "filelock", "asyncio", "sse_starlette")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, logger.handlers[:], logger.filters[:]) for logger in loggers]
    yield
    for logger, (level, handlers, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers, logger.filters = handlers, filters


def test_the_level_is_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning")
    logging.getLogger("engine.core").info("detail")
    logging.getLogger("engine.core").warning("news")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING engine.core: news")


def test_debug_has_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug")
    logging.getLogger("engine.core").debug("detail")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("sse_starlette.sse").debug("chunk: what the model has said")
    assert len(capsys.readouterr().err.splitlines()) == 2


def fail() -> None:
    """Log an error with its traceback, in a request."""
    token = REQUEST_ID.set("req_1")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("server.x").exception("it %s", "failed")
    finally:
        REQUEST_ID.reset(token)


def test_a_line_has_the_id_of_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    fail()
    logging.getLogger("server.x").info("outside")
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR   server.x: it failed [req_1]")
    assert last.endswith("server.x: outside")


def test_json_is_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    fail()
    logging.getLogger("server.x").info("of %d", 2, extra={"fields": {"status": 200, "reasons": ("stop",)}})
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    traceback = first.pop("traceback")
    assert traceback.startswith("Traceback")
    assert traceback.endswith("ValueError: two\nlines")
    assert first == {"level": "error", "logger": "server.x", "message": "it failed", "request_id": "req_1"}
    assert second["request_id"] is None
    assert second["message"] == "of 2"
    assert (second["status"], second["reasons"]) == (200, ["stop"])


def record(level: int, message: str, *args: object, error: type[Exception] | None = None) -> logging.LogRecord:
    exc_info = None if error is None else (error, error(), None)
    return logging.LogRecord("x", level, "", 0, message, args, exc_info)


def test_repeated_warnings_are_counted_not_repeated() -> None:
    now_s = 0.0
    limit = LimitRepeats(lambda: now_s)
    shown = [limit.filter(record(logging.WARNING, "client %d is odd", i)) for i in range(20)]
    assert shown == [True] * 5 + [False] * 15
    assert limit.filter(record(logging.WARNING, "something else"))
    assert limit.filter(record(logging.WARNING, "client %d is odd", 1, error=ValueError))
    now_s = 61.0
    again = record(logging.WARNING, "client %d is odd", 20)
    assert limit.filter(again)
    assert again.getMessage() == "client 20 is odd (15 more like this were left out)"
    following = record(logging.WARNING, "client %d is odd", 21)
    assert limit.filter(following)
    assert following.getMessage() == "client 21 is odd"


def test_what_is_no_warning_is_never_left_out() -> None:
    limit = LimitRepeats(lambda: 0.0)
    assert all(limit.filter(record(logging.INFO, "a request")) for _ in range(100))
