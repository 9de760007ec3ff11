"""Responses that have ended, for `GET` and `previous_response_id`: in memory, bounded in number and bytes.

Kept as JSON, so that what they take is known to the byte, and each with its whole conversation, so that one that goes
takes no other along. A response is its owner's: for others it is not there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from server.json_text import dump
from server.protocol.base import ApiModel
from server.responses.items import parse_items


@dataclass(frozen=True, slots=True)
class Stored:
    """A response that has ended."""

    owner: str
    """`request.state.key_id` of the API key that it was made for; empty on a server without keys."""
    response: bytes
    """JSON of the response."""
    conversation: bytes
    """JSON of all items: those before it and its own."""

    @classmethod
    def of(cls, owner: str, response: dict[str, Any], before: Sequence[dict[str, Any]]) -> Stored:
        """`before`: the items that `response` answers. A call that was cut off is no part of the conversation."""
        own = [item for item in response["output"] if not _is_cut_off_call(item)]
        return cls(owner, dump(response).encode(), dump([*before, *own]).encode())

    @property
    def is_background(self) -> bool:
        """It was made while nobody waited."""
        return bool(from_json(self.response)["background"])

    @property
    def raw_items(self) -> list[dict[str, Any]]:
        """The conversation's items, as they came."""
        items: list[dict[str, Any]] = from_json(self.conversation)
        return items

    @property
    def num_bytes(self) -> int:
        """What it takes, but for its place in the table."""
        return len(self.response) + len(self.conversation)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request goes on from: nothing, if it begins one."""

    raw: Sequence[dict[str, Any]] = ()
    """JSON items, to be kept with what follows."""
    items: Sequence[ApiModel] = ()
    """The same, as models."""

    @classmethod
    def of(cls, stored: Stored) -> Conversation:
        """The conversation of a kept response."""
        raw = stored.raw_items
        return cls(raw, parse_items(raw))


class ResponseStore:
    """The least recently used responses go when there are too many, or too big ones. Event loop only."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        """It keeps anything."""
        return self._max_responses > 0 and self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """What all of them take."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep a response; one that is larger than all the room there is goes at once."""
        self.drop(response_id)
        self._kept[response_id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._kept)))

    def get(self, response_id: str, owner: str) -> Stored | None:
        """The response, if it is kept and is its owner's who asks; it counts as used."""
        stored = self._kept.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._kept.move_to_end(response_id)
        return stored

    def drop(self, response_id: str) -> None:
        """Keep it no more, if it is kept."""
        if (stored := self._kept.pop(response_id, None)) is not None:
            self._num_bytes -= stored.num_bytes


def _is_cut_off_call(item: dict[str, Any]) -> bool:
    return bool(item["type"] == "function_call" and item["status"] != "completed")
