"""Log lines: one handler, to stderr; none for health probes and scrapes; never a prompt or a key."""

from __future__ import annotations

import logging

from config.schema import LogLevel

_UNLOGGED = frozenset({"/live", "/ready", "/health", "/metrics"})


def configure_logging(level: LogLevel) -> None:
    """Send the log lines of the whole process to stderr from `level` up."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger("uvicorn.access").addFilter(_is_no_probe)
    if level == "info":  # uvicorn tells its start and stop; the banner says it better
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    for chatty in ("httpx", "httpcore", "filelock", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def quiet_transformers() -> None:
    """Keep transformers' bars and advice off the terminal. Imports it, and it resets its level then: call it late."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Whether an access-log record is of a request that somebody made on purpose."""
    if not isinstance(record.args, tuple) or len(record.args) < 3:
        return True
    return str(record.args[2]).partition("?")[0] not in _UNLOGGED
