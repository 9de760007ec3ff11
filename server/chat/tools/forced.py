"""Calls that must be made: `tool_choice` "required" or a function's name. They work with any model.

The engine holds the text to a call for each line, `{"name": ..., "arguments": {...}}`, with arguments that validate
against the tool's schema; the model has no choice but which, and with what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import RequestError
from engine.params import GrammarSpec
from server.chat.tools import FORMATS
from server.protocol.chat import ChatCompletionRequest, FunctionDefinition

FORCED_FORMAT = FORMATS["llama3_json"]
"""What the text is, whatever the model would write of its own accord."""

MAX_CALLS = 8
"""Most calls in one answer: a small model that is free to make another one goes on to the end."""


def forced_functions(body: ChatCompletionRequest) -> list[FunctionDefinition]:
    """The functions one of which must be called; none if nothing is forced. Raises RequestError for an unknown name."""
    functions = [tool.function for tool in body.tools or ()]
    if body.tool_choice == "required":
        return functions
    if body.tool_choice is None or isinstance(body.tool_choice, str):
        return []
    name = body.tool_choice.function.name
    if chosen := [function for function in functions if function.name == name]:
        return chosen
    raise RequestError(f"tool_choice names {name[:64]!r}, which is not among tools", param="tool_choice")


def grammar_of_calls(body: ChatCompletionRequest, functions: Sequence[FunctionDefinition]) -> GrammarSpec:
    """One call, or several where that is allowed. The engine refuses schemas that it cannot hold to."""
    is_one = body.parallel_tool_calls is False or body.tool_choice != "required"
    schemas = {function.name: _closed(function.parameters or {}) for function in functions}
    return GrammarSpec.calls(schemas, max_calls=1 if is_one else MAX_CALLS, param="tools")


_OPEN_TO_MORE = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"})
"""Whatever a schema with one of these allows beside its properties is its own affair."""


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object, without arguments that nobody has thought of."""
    ends = {} if schema.keys() & _OPEN_TO_MORE else {"additionalProperties": False}
    return {"type": "object", **schema, **ends}
