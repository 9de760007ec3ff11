"""The one shape of all errors."""

from __future__ import annotations

from server.protocol.base import ApiModel


class ErrorBody(ApiModel):
    """What went wrong."""

    message: str
    """In words, for people: what is wrong, and what would be right."""
    type: str
    """The kind: `invalid_request_error`, `service_unavailable`, `server_error`; the limit: `requests`, `tokens`."""
    param: str | None
    """The field at fault, as `messages[0].content`, if there is one."""
    code: str | None
    """For programs."""


class ErrorEnvelope(ApiModel):
    """The body of every answer that is not a success, and the last event of a stream that failed."""

    error: ErrorBody
