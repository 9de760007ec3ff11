"""How /v1/responses writes its events: each by its name, and nothing after the last one."""

from __future__ import annotations

from server.errors import ApiError
from server.json_text import dump_line

_NAME_START = len('{"type":"')


class NamedEvents:
    """See `sse.Framing`. The events' JSON begins with their type (`transcript.Transcript`), which is their name."""

    end = b""

    def event(self, text: str) -> bytes:
        """See Framing."""
        name = text[_NAME_START : text.index('"', _NAME_START)]
        return f"event: {name}\ndata: {text}\n\n".encode()

    def error(self, error: ApiError) -> bytes:
        """See Framing. Only before the first event, when headers went out to keep the connection."""
        body = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return self.event(dump_line({**body, "sequence_number": 0}))
