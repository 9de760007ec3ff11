"""POST /v1/responses: what it takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag

from server import limits
from server.protocol.base import ApiModel, Integer, JsonObject, Many, OnlyFalse, documented
from server.protocol.generation import SamplingRequest

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputPart(ApiModel):
    """A piece of text, of whoever's."""

    type: Literal["input_text", "output_text", "text"]
    """Text is the only kind that is supported."""
    text: str


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


InputContent = Annotated[Many[InputPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart])]


class MessageItem(ApiModel):
    """One turn of the conversation: the client's, or one that an earlier response put out."""

    type: Literal["message"] = "message"
    """May be left out."""
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent
    id: str | None = None
    """In what a response put out. Changes nothing."""
    status: ItemStatus | None = None
    """As `id`."""
    phase: None = None
    """Not supported."""


class FunctionCallItem(ApiModel):
    """A call that an earlier response made."""

    type: Literal["function_call"]
    call_id: str
    """By which its result is known."""
    name: str
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    """Changes nothing."""
    status: ItemStatus | None = None
    """Changes nothing."""


class FunctionCallOutputItem(ApiModel):
    """What a call gave. The call must come before it, here or in the previous response."""

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent
    id: str | None = None
    """Changes nothing."""
    status: ItemStatus | None = None
    """Changes nothing."""


class ReasoningText(ApiModel):
    """Thoughts, in the model's own words."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ApiModel):
    """Thoughts that an earlier response put out, for templates that show them to the model again."""

    type: Literal["reasoning"]
    id: str | None = None
    """Changes nothing."""
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    """Not supported: this server makes none."""
    content: Many[ReasoningText] | None = None
    encrypted_content: None = None
    """Not supported: thoughts are never encrypted here."""
    status: ItemStatus | None = None
    """Changes nothing."""


INPUT_ITEMS: dict[str, type[ApiModel]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}
"""Item type -> its model."""


def item_type(item: Any) -> Any:
    """What kind of item a JSON object says it is. A message need not say."""
    return "message" if (kind := item.get("type")) is None else kind


_DocumentedItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(item_type),
]


def _as_items(value: Any) -> Any:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[
    Many[JsonObject],
    Field(max_length=limits.MAX_MESSAGES),
    BeforeValidator(_as_items, json_schema_input_type=str | list[_DocumentedItem]),
]
"""Items as they came: `responses.items` reads each by its kind, so that errors name it as `input[3].content`."""


class ResponseTool(ApiModel):
    """A function that the model may call. Tools of other kinds run at OpenAI; there are none here."""

    type: Literal["function"]
    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    """What it does, for the model to read."""
    parameters: JsonObject | None = None
    """A JSON schema of its arguments, for the model to read. Left out: it has none."""
    strict: bool | None = None
    """Forced calls (see `tool_choice`) are held to the schema, others are not, whatever this says."""
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None
    """The model calls directly; programs are not supported."""
    async_: OnlyFalse | None = Field(default=None, alias="async")
    """Not supported."""
    defer_loading: OnlyFalse | None = None
    """Not supported."""
    output_schema: None = None
    """Not supported."""


class NamedResponseTool(ApiModel):
    """The function that must be called."""

    type: Literal["function"]
    name: str


def _as_tool_choice(value: Any) -> Any:
    """Two kinds of values; what is neither is refused in one sentence."""
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return NamedResponseTool.model_validate(value)
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    raise ValueError('tool_choice must be "none", "auto", "required" or {"type": "function", "name": ...}')


ResponseToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedResponseTool,
    PlainValidator(_as_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedResponseTool),
]


class TextFormat(ApiModel):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    """`text`: anything. `json_object`: any JSON object."""
    name: str | None = None
    """For the client's own records."""
    description: str | None = None
    """For the client's own records."""
    schema_: JsonObject | None = Field(default=None, alias="schema")
    """With the type `json_schema` only, which needs it: JSON Schema, draft 2020-12."""
    strict: bool | None = None
    """The schema is always followed."""


class TextConfig(ApiModel):
    """About the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Others than the usual one are not supported."""


class ReasoningConfig(ApiModel):
    """About the thoughts (`--reasoning-parser`)."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Handed to the chat template; refused if it has no such switch (`none` then asks for nothing)."""
    summary: None = None
    """Not supported: thoughts come in the model's own words."""
    generate_summary: None = None
    """Not supported."""


class ResponseStreamOptions(ApiModel):
    """What a stream carries beside the text."""

    include_obfuscation: OnlyFalse | None = None
    """Padding against guessing text from the sizes of packets is not supported."""


class ResponsesRequest(SamplingRequest):
    """A conversation in, the model's next items out."""

    input: Input
    """A text, or the conversation's items, in order."""
    instructions: str | None = None
    """A system message before everything else. Those of a previous response are not taken over."""
    previous_response_id: str | None = None
    """Go on from this response: its conversation and what it put out come before `input`."""
    max_output_tokens: Integer | None = documented(minimum=1)
    """Most tokens to generate, thoughts and calls too. Left out: up to the context length."""
    text: TextConfig | None = None
    """What the text must be."""
    tools: Annotated[Many[ResponseTool], Field(max_length=limits.MAX_TOOLS)] | None = None
    """What the model may call."""
    tool_choice: ResponseToolChoice | None = None
    """`auto`: the model may call tools. `none`: it is not shown them. `required`, or one by its name: it must call one,
    with arguments that validate; works with any model."""
    parallel_tool_calls: bool | None = documented(default=True)
    """False: one call at most."""
    reasoning: ReasoningConfig | None = None
    """About the thoughts."""
    store: bool | None = documented(default=True)
    """Keep the response, in memory, for `GET` and `previous_response_id`: as long as there is room, to the end of the
    process at most."""
    background: bool | None = documented(default=False)
    """Answer at once, and make the response meanwhile: ask for it with `GET`, end it with `cancel`. Not for streams."""
    metadata: dict[str, str] | None = Field(default=None, max_length=limits.MAX_METADATA)
    """Up to 16 values by name, to be given back with the response."""
    stream_options: ResponseStreamOptions | None = None
    """With `stream` only."""
    chat_template_kwargs: JsonObject | None = None
    """Switches of the model's chat template, such as `enable_thinking`."""
