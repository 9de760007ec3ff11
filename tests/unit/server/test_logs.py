"""Log lines: whose, and whose not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from server.logs import configure_logging


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    names = ("", "uvicorn.error", "uvicorn.access", "httpx", "httpcore", "filelock", "asyncio")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, logger.handlers[:], logger.filters[:]) for logger in loggers]
    yield
    for logger, (level, handlers, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers, logger.filters = handlers, filters


def access(path: str) -> None:
    """Log a request as uvicorn does."""
    message = '%s - "%s %s HTTP/%s" %d'
    logging.getLogger("uvicorn.access").info(message, "127.0.0.1:1", "GET", path, "1.1", 200)


def test_requests_are_logged_probes_and_scrapes_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    for path in ("/health", "/live?x=1", "/ready", "/metrics", "/v1/models"):
        access(path)
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert '"GET /v1/models HTTP/1.1" 200' in line


def test_the_level_is_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning")
    access("/v1/models")
    logging.getLogger("engine.core").info("detail")
    logging.getLogger("engine.core").warning("news")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING engine.core: news")


def test_debug_has_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug")
    logging.getLogger("engine.core").debug("detail")
    logging.getLogger("uvicorn.error").info("Started server process")
    assert len(capsys.readouterr().err.splitlines()) == 2
