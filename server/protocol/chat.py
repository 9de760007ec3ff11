"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from server.protocol.base import ApiModel, documented
from server.protocol.generation import FinishReason, GenerationRequest, Usage


class TextPart(ApiModel):
    """A piece of a message."""

    type: Literal["text"]
    """Text is the only kind that is supported."""
    text: str


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Content = Annotated[list[TextPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]


class FunctionCall(ApiModel):
    """What an earlier answer called."""

    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCall(ApiModel):
    """A call that an earlier answer made."""

    type: Literal["function"] = "function"
    id: str | None = None
    function: FunctionCall


class ChatMessage(ApiModel):
    """One turn of the conversation. What the model's chat template makes of it is the template's choice."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` is `system` by its newer name."""
    content: Content | None = None
    """Needed, unless an assistant's message has tool calls."""
    name: str | None = None
    """Who speaks, for templates that tell several users apart."""
    tool_calls: list[ToolCall] | None = None
    """In an assistant's message: what it called."""
    tool_call_id: str | None = None
    """In a tool's message: which call this is the result of."""
    reasoning_content: str | None = None
    """In an assistant's message: its thoughts, for templates that show them."""
    function_call: None = None
    """Not supported: see `tool_calls`."""
    audio: None = None
    """Not supported."""


class ChatCompletionRequest(GenerationRequest):
    """A conversation in, its next message out."""

    messages: list[ChatMessage]
    """The conversation so far, in order."""
    max_completion_tokens: int | None = documented(minimum=1)
    """The newer name of `max_tokens`; wins if both are there."""
    add_generation_prompt: bool | None = None
    """Open the assistant's turn. On by default, unless `continue_final_message` is."""
    continue_final_message: bool | None = None
    """Leave the last message open, and go on with it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Switches of the model's chat template, such as `enable_thinking`."""


class AnswerMessage(ApiModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(ApiModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: FinishReason
    """`stop`: the model ended it, or a stop string or token did. `length`: `max_tokens` or the context is used up."""
    stop_reason: str | int | None
    """The stop string or token id that ended it."""


class ChatCompletion(ApiModel):
    """A full answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    """When, in seconds since 1970."""
    model: str
    system_fingerprint: str
    """Changes with whatever may change the text: the build, the model, its number type, the kernels."""
    choices: list[ChatChoice]
    usage: Usage


class Delta(ApiModel):
    """What is new in a choice's message."""

    role: Literal["assistant"] | None = None
    """In a choice's first chunk only."""
    content: str | None = None


class ChatChunkChoice(ApiModel):
    """New text of one choice."""

    index: int
    delta: Delta
    logprobs: None
    finish_reason: FinishReason | None
    """Null until the choice's last chunk."""
    stop_reason: str | int | None = None


class ChatCompletionChunk(ApiModel):
    """One event of a stream. The contents of a choice's deltas, joined, are the content of the full answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    """Empty in the chunk with the usage, the last one."""
    usage: Usage | None = None
