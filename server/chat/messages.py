"""API messages -> the plain dicts that chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.errors import RequestError
from server.protocol.chat import ChatMessage, ToolCall

_TEMPLATE_ROLES = {"developer": "system"}  # templates know the older name only


def to_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Each message as a dict without absent fields. Raises RequestError naming the message."""
    if not messages:
        raise RequestError("messages is empty: it needs at least one message", param="messages", code="invalid_value")
    return [_to_template(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _to_template(message: ChatMessage, where: str) -> dict[str, Any]:
    calls_tools = message.role == "assistant" and bool(message.tool_calls)
    if message.content is None and not calls_tools:
        raise RequestError(
            f"{where}.content is required: a string or an array of text parts "
            "(an assistant's message with tool_calls may do without)",
            param=f"{where}.content",
            code="invalid_value",
        )
    fields = message.model_dump(exclude_none=True, exclude={"tool_calls"})
    fields["role"] = _TEMPLATE_ROLES.get(message.role, message.role)
    if message.tool_calls:
        fields["tool_calls"] = [
            _call_to_template(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return fields


def _call_to_template(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates want the arguments as an object, where the API has JSON text."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        name = f"{where}.function.arguments"
        raise RequestError(f"{name} must be a JSON object, as text", param=name, code="invalid_value")
    fields = call.model_dump(exclude_none=True)
    fields["function"]["arguments"] = arguments
    return fields
