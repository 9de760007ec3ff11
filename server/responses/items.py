"""The items of a conversation -> the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.errors import RequestError
from server.body import validate
from server.limits import MAX_MESSAGES
from server.protocol.base import ApiModel
from server.protocol.chat import ChatMessage, FunctionCall, TextPart, ToolCall
from server.protocol.responses import (
    INPUT_ITEMS,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputPart,
    MessageItem,
    ReasoningItem,
    item_type,
)


def parse_items(items: Sequence[dict[str, Any]]) -> list[ApiModel]:
    """Each item of `input` as its model. Raises RequestError naming the item."""
    if not items:
        raise _invalid("input", "input is empty: it needs a text or at least one item")
    return [_parse(item, f"input[{index}]") for index, item in enumerate(items)]


def _parse(item: dict[str, Any], where: str) -> ApiModel:
    kind = item_type(item)
    if not isinstance(kind, str) or kind not in INPUT_ITEMS:
        kinds = ", ".join(INPUT_ITEMS)
        raise RequestError(
            f"{where}.type must be one of {kinds}; other items are not supported",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    parsed = validate(INPUT_ITEMS[kind], item, where)
    if isinstance(parsed, FunctionCallItem) and not _is_object(parsed.arguments):
        raise _invalid(f"{where}.arguments", f"{where}.arguments must be a JSON object, as text")
    return parsed


def to_messages(earlier: Sequence[ApiModel], items: Sequence[ApiModel]) -> list[ChatMessage]:
    """The conversation that `earlier` items and then those of `input` make.

    What the model put out in one turn becomes one assistant's message, as chat templates have it: thoughts, text and
    calls. Raises RequestError for the result of a call that was not made.
    """
    if len(earlier) + len(items) > MAX_MESSAGES:
        count = f"{len(items)} items, and the previous response {len(earlier)}"
        raise _invalid("input", f"input has {count}: a conversation may have {MAX_MESSAGES}")
    conversation = _Conversation()
    for item in earlier:
        conversation.add(item, "")
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    return conversation.finish()


class _Conversation:
    """Messages so far, and the assistant's turn that is not finished."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._call_ids: set[str] = set()
        self._begin_turn()

    def add(self, item: ApiModel, where: str) -> None:
        """Add the next item; `where` is its name in errors."""
        match item:
            case ReasoningItem():
                if self._parts or self._calls:
                    self._end_turn()
                self._thoughts += [part.text for part in item.content or ()]
            case FunctionCallItem():
                self._call_ids.add(item.call_id)
                self._calls.append(
                    ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
                )
            case MessageItem(role="assistant"):
                if self._parts or self._calls:
                    self._end_turn()
                self._parts += _text_parts(item.content)
                self._has_text = True
            case MessageItem():
                self._end_turn()
                self._messages.append(ChatMessage(role=item.role, content=_text_parts(item.content)))
            case FunctionCallOutputItem():
                self._add_result(item, where)

    def finish(self) -> list[ChatMessage]:
        """All messages."""
        self._end_turn()
        return self._messages

    def _add_result(self, item: FunctionCallOutputItem, where: str) -> None:
        if item.call_id not in self._call_ids:
            message = f"{where}.call_id is {item.call_id[:64]!r}: no function_call before it has this call_id"
            raise _invalid(f"{where}.call_id", message)
        self._end_turn()
        content = _text_parts(item.output)
        self._messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=content))

    def _begin_turn(self) -> None:
        self._thoughts: list[str] = []
        self._parts: list[TextPart] = []
        self._calls: list[ToolCall] = []
        self._has_text = False

    def _end_turn(self) -> None:
        """Thoughts alone are no message: templates show them with what they led to."""
        if self._has_text or self._calls:
            self._messages.append(
                ChatMessage(
                    role="assistant",
                    content=self._parts if self._has_text else None,
                    tool_calls=self._calls or None,
                    reasoning_content="".join(self._thoughts) or None,
                )
            )
        self._begin_turn()


def _text_parts(parts: Sequence[InputPart]) -> list[TextPart]:
    return [TextPart(type="text", text=part.text) for part in parts]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
