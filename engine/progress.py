"""How long work reports how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called from time to time, in the thread that works."""

    def __call__(self, stage: str, done: float | None = None) -> None:
        """`stage` is what is being done, in words; `done` the share of it that is done, 0 to 1, if known."""
