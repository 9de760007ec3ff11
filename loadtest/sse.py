"""Server-sent events, as much of them as streamed completions use. Pure: bytes in, payloads out."""

from __future__ import annotations


class EventSplitter:
    """Cuts a body that arrives in pieces into the payloads of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that `data` completes. Comments and fields other than `data` are dropped."""
        text = self._rest + data
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        return [payload for event in events if (payload := _payload(event))]


def _payload(event: bytes) -> bytes:
    if b"\n" not in event:  # the usual case: one line
        return event[5:].strip() if event.startswith(b"data:") else b""
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
