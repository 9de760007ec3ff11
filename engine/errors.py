"""Everything the engine raises on purpose.

EngineError
|-- ConfigError        what the operator asked for cannot be done; raised before or while loading
|   `-- ModelError     the model cannot be found, read, or served by this engine
|-- RequestError       one request is at fault: it alone fails, with its field's name (HTTP 400)
|-- Overloaded         no room for one more request now; try again after `retry_after_s` (HTTP 503)
|-- DeadlineExceeded   a request did not end in the time it was given (HTTP 504)
`-- EngineDead         the engine thread has ended; nothing will be computed any more (HTTP 500)
    `-- EngineStopped  ... because it was told to, as at a shutdown (HTTP 503)
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


def is_fault(error: BaseException) -> bool:
    """Whether something went wrong, rather than somebody wants to end. A panic of a Rust library is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class ConfigError(EngineError):
    """A setting cannot be honoured. `hint` says what would work."""

    def __init__(self, message: str, *, setting: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting
        self.hint = hint


class ModelError(ConfigError):
    """The model cannot be found, read, or served by this engine."""


class RequestError(EngineError):
    """One request is at fault. `param` names the field; `code` is the API's error code, if it has one for this."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(EngineError):
    """No room for one more request now."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(EngineError):
    """A request did not end in the time it was given."""


class EngineDead(EngineError):
    """The engine thread has ended, by a fault or by shutdown; nothing will be computed any more."""


class EngineStopped(EngineDead):
    """The engine thread has ended as it was told to: no fault, and a request may be asked again elsewhere."""
