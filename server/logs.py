"""Log lines: one handler, to stderr, in text or as JSON; the id of the request on each line that is about one.

Never a key; a prompt only if `--log-prompts` asks for it. No line for health probes and scrapes (`server.requestlog`
has the one line that every other request gets). Warnings that say the same again and again are counted, not repeated.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from config.schema import LogFormat, LogLevel

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that this task answers; "" outside of them."""

_MAX_REPEATS = 5
_REPEATS_PERIOD_S = 60.0
_MAX_KINDS = 1000
"""Kinds of lines that are counted at once: they come from code, so there are never as many."""


def configure_logging(level: LogLevel, log_format: LogFormat = "text") -> None:
    """Send the log lines of the whole process to stderr from `level` up."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else _TextFormatter())
    handler.addFilter(_add_request_id)
    handler.addFilter(LimitRepeats())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level == "info":  # uvicorn tells its start and stop; the banner says it better
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    for chatty in ("httpx", "httpcore", "filelock", "asyncio", "sse_starlette"):  # the last logs each chunk's text
        logging.getLogger(chatty).setLevel(logging.WARNING)


def quiet_transformers() -> None:
    """Keep transformers' bars and advice off the terminal. Imports it, and it resets its level then: call it late."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = REQUEST_ID.get()
    return True


class _TextFormatter(logging.Formatter):
    """For people: `12:00:00 WARNING server.x: message [request id]`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, with the id before the traceback."""
        request_id = getattr(record, "request_id", "")
        return super().formatMessage(record) + (f" [{request_id}]" if request_id else "")


class JsonFormatter(logging.Formatter):
    """For programs: one object a line. What is logged with `extra={"fields": {...}}` has members of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        members = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", "") or None,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            members["traceback"] = self.formatException(record.exc_info)
        return json.dumps(members, ensure_ascii=False, default=str)


@dataclass(slots=True)
class _Repeats:
    """One kind of line within a period."""

    began_s: float
    num_shown: int = 0
    num_hidden: int = 0


class LimitRepeats:
    """A filter for warnings and errors: a few of a kind in a minute, then one that says how many were left out.

    Of a kind are lines that one place in the code writes, about one type of exception.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, str, str], _Repeats] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is shown."""
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[0] if record.exc_info else None
        kind = (record.name, str(record.msg), "" if error is None else error.__name__)
        repeats = self._kinds.get(kind)
        if repeats is None or self._clock() - repeats.began_s > _REPEATS_PERIOD_S:
            if repeats is not None and repeats.num_hidden:
                record.msg = f"{record.getMessage()} ({repeats.num_hidden} more like this were left out)"
                record.args = ()
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            repeats = self._kinds[kind] = _Repeats(self._clock())
        if repeats.num_shown >= _MAX_REPEATS:
            repeats.num_hidden += 1
            return False
        repeats.num_shown += 1
        return True
