"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from server import limits
from server.protocol.base import ApiModel, Integer, JsonObject, Many, OnlyFalse, documented, exactly
from server.protocol.generation import FinishReason, GenerationRequest, PromptLogprobs, Usage


class TextPart(ApiModel):
    """A piece of a message."""

    type: Literal["text"]
    """Text is the only kind that is supported."""
    text: str


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Content = Annotated[Many[TextPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]


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
    tool_calls: Many[ToolCall] | None = None
    """In an assistant's message: what it called."""
    tool_call_id: str | None = None
    """In a tool's message: which call this is the result of."""
    reasoning_content: str | None = None
    """In an assistant's message: its thoughts, for templates that show them."""
    function_call: None = None
    """Not supported: see `tool_calls`."""
    audio: None = None
    """Not supported."""


Messages = Annotated[Many[ChatMessage], Field(max_length=limits.MAX_MESSAGES)]


class FunctionDefinition(ApiModel):
    """A function that the model may call."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    """What it does, for the model to read."""
    parameters: JsonObject | None = None
    """A JSON schema of its arguments, for the model to read. Left out: it has none."""
    strict: bool | None = None
    """Forced calls (see `tool_choice`) are held to the schema, others are not, whatever this says."""


class Tool(ApiModel):
    """Something that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def to_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.function.parameters or _NO_PARAMETERS}}


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

Tools = Annotated[Many[Tool], Field(max_length=limits.MAX_TOOLS)]


class NamedFunction(ApiModel):
    """A function by its name."""

    name: str


class NamedTool(ApiModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def _as_tool_choice(value: Any) -> Any:
    """Two kinds of values; what is neither is refused in one sentence."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return NamedTool.model_validate(value)
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    named = '{"type": "function", "function": {"name": ...}}'
    raise ValueError(f'tool_choice must be "none", "auto", "required" or {named}')


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    PlainValidator(_as_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool),
]


class ChatCompletionRequest(GenerationRequest):
    """A conversation in, its next message out."""

    messages: Messages
    """The conversation so far, in order."""
    max_completion_tokens: Integer | None = documented(minimum=0)
    """The newer name of `max_tokens`; wins if both are there."""
    tools: Tools | None = None
    """What the model may call. To call of its own accord, it needs a template and a `--tool-parser` that know how."""
    tool_choice: ToolChoice | None = None
    """`auto`: the model may call tools. `none`: it is not shown them. `required`, or one by its name: it must call one,
    with arguments that validate; works with any model."""
    parallel_tool_calls: bool | None = documented(default=True)
    """False: one call at most; of those that a model makes of its own accord, the first is kept."""
    add_generation_prompt: bool | None = None
    """Open the assistant's turn. On by default, unless `continue_final_message` is."""
    continue_final_message: bool | None = None
    """Leave the last message open, and go on with it."""
    logprobs: bool | None = None
    """Report the logprob of each token."""
    top_logprobs: Integer | None = documented(minimum=0, maximum=20)
    """With `logprobs`: those of this many most likely tokens too."""
    echo: OnlyFalse | None = None
    """Of /v1/completions only."""
    best_of: Annotated[Literal[1], exactly(1)] | None = None
    """Of /v1/completions only."""
    chat_template_kwargs: JsonObject | None = None
    """Switches of the model's chat template, such as `enable_thinking`."""


class CalledFunction(ApiModel):
    """What is called."""

    name: str
    arguments: str
    """A JSON object, as text."""


class AnswerCall(ApiModel):
    """A call that the model makes."""

    id: str
    """For the message with the result: `tool_call_id`."""
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(ApiModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    """Null if the model calls tools and says nothing else."""
    refusal: None
    reasoning_content: str | None = None
    """The thoughts before it (`--reasoning-parser`). Absent if there are none."""
    tool_calls: list[AnswerCall] | None = None
    """Absent if there are none."""


ChatFinishReason = FinishReason | Literal["tool_calls"]


class TopLogprob(ApiModel):
    """One of the most likely tokens at some place."""

    token: str
    """Its text. A part of a character is written as its bytes, `\\xe2\\x80`."""
    logprob: float
    """-9999.0 stands for minus infinity."""
    bytes: list[int] | None
    """What it adds to the text. Null for tokens that are not shown: special ones, and the one that ended the text."""


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]
    """The most likely tokens at its place."""


class ChatLogprobs(ApiModel):
    """An entry for each token."""

    content: list[TokenLogprob]
    refusal: None


class ChatChoice(ApiModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    """`stop`: the model ended it, or a stop string or token did. `length`: `max_tokens` or the context is used up.
    `tool_calls`: the model ended it, and calls tools."""
    stop_reason: str | int | None
    """The stop string or token id that ended it."""
    token_ids: list[int] | None = None
    """With `return_token_ids`: those that were generated."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""


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
    prompt_logprobs: PromptLogprobs | None = None
    """With `prompt_logprobs`: of the prompt that the template makes of the messages."""


class DeltaFunction(ApiModel):
    """What a call calls, bit by bit."""

    name: str | None = None
    """With the call's first part only."""
    arguments: str
    """More of them; joined, they are a JSON object, unless the call is cut off."""


class DeltaCall(ApiModel):
    """A call, or more of the last one's arguments."""

    index: int
    """Its number among the message's calls."""
    id: str | None = None
    """With the call's first part only, as `type`."""
    type: Literal["function"] | None = None
    function: DeltaFunction


class Delta(ApiModel):
    """What is new in a choice's message."""

    role: Literal["assistant"] | None = None
    """In a choice's first chunk only."""
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaCall] | None = None


class ChatChunkChoice(ApiModel):
    """New text of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    """Of the tokens that are new in this chunk."""
    finish_reason: ChatFinishReason | None
    """Null until the choice's last chunk."""
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    """With `return_token_ids`: those that are new in this chunk."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`, in a choice's first chunk only."""


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
