"""Values -> JSON texts for the wire."""

from __future__ import annotations

import json
from typing import Any

dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Compact, not escaped, NaN refused."""

_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Raw in JSON they are right, but line readers (`str.splitlines`, so httpx's `iter_lines`) break an event at them."""


def dump_line(value: Any) -> str:
    """`value` as JSON on one line, for every kind of line reader."""
    text = dump(value)
    if not text.isascii():
        for character, escape in _LINE_ENDS.items():  # which JSON has in strings only
            text = text.replace(character, escape)
    return text
