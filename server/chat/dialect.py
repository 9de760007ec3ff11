"""What is known of the served model's way to answer: settings, and what its chat template shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from config.schema import ServerConfig
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from server.chat.conversation import Conversation
from server.chat.reader import Reading
from server.chat.reasoning import opens_thoughts
from server.chat.tools import FORMATS, detect
from server.chat.tools.forced import FORCED_FORMAT, forced_functions
from server.chat.tools.format import Format
from server.chat.tools.instructions import with_instructions
from server.protocol.chat import ChatCompletionRequest

_PROMPT_END_LEN = 8
"""Tokens at a prompt's end that are enough to have the tag that opens thoughts, and the blanks after it."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the served model writes thoughts and calls."""

    thinks: bool = False
    tool_format: Format | None = None
    """None if it writes no calls that are known here."""
    shows_tools: bool = False
    """The chat template tells the model of tools."""

    @classmethod
    def of(cls, settings: ServerConfig, tokenizer: Tokenizer) -> Dialect:
        """As the settings say; `auto` goes by the chat template."""
        if settings.tool_parser == "auto":
            tool_format = detect(tokenizer.chat_template)
        else:
            tool_format = FORMATS.get(settings.tool_parser)  # not there: none
        return cls(settings.reasoning_parser == "think", tool_format, "tools" in tokenizer.chat_template)

    def reading(
        self, body: ChatCompletionRequest, prompt: Sequence[int], tokenizer: Tokenizer, *, has_form: bool
    ) -> Reading | None:
        """How the answers to a request are to be read; None: as they are.

        `prompt`: its tokens. `has_form`: what follows the thoughts is held to a grammar, and has no calls in it but
        those that are forced.
        """
        tool_format = None if has_form else self.tool_format
        names = frozenset(tool["function"]["name"] for tool in offered_tools(body) or ())
        if forced := forced_functions(body):
            tool_format, names = FORCED_FORMAT, frozenset(function.name for function in forced)
        if not (self.thinks or (names and tool_format)):
            return None
        is_thinking = self.thinks and opens_thoughts(
            tokenizer.decode(prompt[-_PROMPT_END_LEN:], skip_special_tokens=False)
        )
        return Reading(
            thinks=self.thinks,
            is_thinking=is_thinking,
            tool_format=tool_format if names else None,
            tool_names=names,
            has_parallel_calls=body.parallel_tool_calls is not False,
        )

    def conversation(self, conversation: Conversation) -> Conversation:
        """The conversation, with tools in words if the template would not show them."""
        if not conversation.tools or self.shows_tools:
            return conversation
        return replace(conversation, messages=with_instructions(conversation.messages, conversation.tools), tools=None)

    def check(self, body: ChatCompletionRequest) -> None:
        """Raise RequestError for tools that the model cannot be offered."""
        if body.tool_choice is not None and body.tool_choice != "none" and not body.tools:
            raise RequestError("tool_choice needs tools", param="tool_choice", code="invalid_value")
        tools = offered_tools(body) or ()
        if tools and self.tool_format is None and body.tool_choice in (None, "auto"):
            raise RequestError(
                "this model cannot choose to call tools: its chat template has no calls of a form that is known here "
                '(--tool-parser names one). tool_choice "required", or a function\'s name, works with any model',
                param="tools",
                code="unsupported_parameter",
            )
        seen = set()
        for index, tool in enumerate(tools):
            name = tool["function"]["name"]
            where = f"tools[{index}].function"
            if name in seen:
                raise RequestError(f"{where}.name is there twice: {name!r}", param=f"{where}.name")
            if tool["function"]["parameters"].get("type", "object") != "object":
                message = f"{where}.parameters must be the schema of an object"
                raise RequestError(message, param=f"{where}.parameters")
            seen.add(name)


def offered_tools(body: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """The tools that the template shows the model: none if it is to call none."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [tool.to_template() for tool in body.tools]
