"""Tools for models whose chat template knows none: told in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = """\
You can call functions. To call one, answer with nothing but a line of JSON: {"name": ..., "arguments": {...}}
The functions:
"""


_Dict = Mapping[str, Any]


def with_instructions(messages: Sequence[_Dict], tools: Sequence[_Dict]) -> list[dict[str, Any]]:
    """The messages, of which the first says what can be called; earlier calls are shown as they were to be written."""
    words = _WORDS + "\n".join([_dump(tool["function"]) for tool in tools])
    shown = [_with_calls(message) for message in messages]
    if shown[0]["role"] in ("system", "user"):  # some templates know no system role
        shown[0]["content"] = [_part(words), *shown[0]["content"]]
        return shown
    return [{"role": "system", "content": [_part(words)]}, *shown]


def _with_calls(message: _Dict) -> dict[str, Any]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [_dump({"name": function["name"], "arguments": function["arguments"]}) for function in functions]
    return {**message, "content": [*message.get("content", ()), *map(_part, calls)]}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
