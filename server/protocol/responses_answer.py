"""/v1/responses: what it gives, in full and as events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from server.protocol.base import ApiModel
from server.protocol.responses import ItemStatus, NamedResponseTool, ReasoningText, TextFormat


class OutputText(ApiModel):
    """Text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    """Always empty: nothing here cites anything."""
    logprobs: list[Any] = Field(max_length=0)
    """Always empty: `include` is not supported."""


class OutputMessage(ApiModel):
    """What the model says."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputCall(ApiModel):
    """A call that the model makes."""

    type: Literal["function_call"]
    id: str
    call_id: str
    """For the `function_call_output` item with the result."""
    name: str
    arguments: str
    """A JSON object, as text."""
    status: ItemStatus


class OutputReasoning(ApiModel):
    """What the model thinks (`--reasoning-parser`)."""

    type: Literal["reasoning"]
    id: str
    summary: list[Any] = Field(max_length=0)
    """Always empty: see `content`."""
    content: list[ReasoningText]
    status: ItemStatus


OutputItem = Annotated[OutputMessage | OutputCall | OutputReasoning, Field(discriminator="type")]


class InputTokensDetails(ApiModel):
    """About the prompt's tokens."""

    cached_tokens: int
    """Those that the prefix cache had."""


class OutputTokensDetails(ApiModel):
    """About the tokens generated."""

    reasoning_tokens: int
    """Those of the thoughts, as the tokenizer counts their text."""


class ResponseUsage(ApiModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(ApiModel):
    """Why a response failed."""

    code: Literal["server_error", "invalid_prompt", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(ApiModel):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]
    """`max_output_tokens` or the context is used up."""


class AnsweredText(ApiModel):
    """About the text."""

    format: TextFormat


class AnsweredReasoning(ApiModel):
    """About the thoughts."""

    effort: str | None
    summary: None


class AnsweredTool(ApiModel):
    """A function that the model could call."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ResponseObject(ApiModel):
    """A response: what was asked for, and what came of it."""

    id: str
    object: Literal["response"]
    created_at: int
    """When, in seconds since 1970."""
    completed_at: int | None
    """When it was completed; null if it is not."""
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    """With the status `failed` only."""
    incomplete_details: IncompleteDetails | None
    """With the status `incomplete` only."""
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    """Thoughts, messages and calls, in the order in which the model made them."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: AnsweredReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: AnsweredText
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool
    tools: list[AnsweredTool]
    top_logprobs: Literal[0]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    """Null until it has ended."""
    user: str | None


EventType = Literal[
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "response.failed",
]


class ResponseEvent(ApiModel):
    """One event of a stream. What it has beside the first two members depends on its type."""

    type: EventType
    """The event's name, too."""
    sequence_number: int
    """0, 1, 2 ..."""
    response: ResponseObject | None = None
    """The response as it stands: in the first two events and in the last one."""
    output_index: int | None = None
    """The item's place in `output`."""
    item: OutputItem | None = None
    """The item as it stands."""
    item_id: str | None = None
    content_index: int | None = None
    """The part's place in the item's `content`: 0."""
    part: OutputText | ReasoningText | None = None
    """The part as it stands."""
    delta: str | None = None
    """What is new of the text or the arguments."""
    text: str | None = None
    """The whole text."""
    arguments: str | None = None
    """The whole arguments."""
    name: str | None = None
    """The function's name, with its whole arguments."""
    logprobs: list[Any] | None = Field(default=None, max_length=0)
    """Always empty."""


class DeletedResponse(ApiModel):
    """A response that is kept no more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
