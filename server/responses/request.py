"""What /v1/responses was asked -> the same as a chat's request, and the response that says so."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from engine.errors import RequestError
from server import limits
from server.protocol.base import ApiModel
from server.protocol.chat import (
    ChatCompletionRequest,
    ChatMessage,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    TextPart,
    Tool,
)
from server.protocol.generation import SamplingRequest
from server.protocol.responses import NamedResponseTool, ResponsesRequest, ResponseTool, TextFormat
from server.protocol.structured import JsonSchema, ResponseFormat
from server.responses.items import to_messages


def check(body: ResponsesRequest, *, keeps_responses: bool) -> None:
    """Raise RequestError for fields that contradict each other, and for what is out of bounds."""
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options", "stream_options is for streams: set stream to true, or leave it out")
    if body.background:
        if body.stream:
            raise _unsupported("background", "background is not supported for streams: leave one of the two out")
        if body.store is False:
            raise _invalid("background", "background needs store: the response could not be asked for otherwise")
        if not keeps_responses:
            raise _unsupported("background", "background is not supported: this server keeps no responses")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise _invalid("max_output_tokens", f"max_output_tokens must be at least 1, got {body.max_output_tokens}")
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: Mapping[str, str]) -> None:
    for name, value in metadata.items():
        if len(name) > limits.MAX_METADATA_NAME_LEN or len(value) > limits.MAX_METADATA_VALUE_LEN:
            bounds = f"{limits.MAX_METADATA_NAME_LEN} characters and values of {limits.MAX_METADATA_VALUE_LEN}"
            raise _invalid("metadata", f"metadata may have names of {bounds} at most")


def to_chat(
    body: ResponsesRequest, earlier: Sequence[ApiModel], items: Sequence[ApiModel], *, chat_template: str
) -> ChatCompletionRequest:
    """The chat that asks for the same. Raises RequestError, in this route's names."""
    instructions = []
    if body.instructions is not None:
        content = [TextPart(type="text", text=body.instructions)]
        instructions = [ChatMessage(role="system", content=content)]
    shared = {name: getattr(body, name) for name in SamplingRequest.model_fields}
    choice = body.tool_choice
    return ChatCompletionRequest.model_construct(  # of checked values; only the defaults are to be filled in
        **shared | {"stream": None},
        messages=[*instructions, *to_messages(earlier, items)],
        max_completion_tokens=body.max_output_tokens,
        response_format=None if body.text is None else _response_format(body.text.format),
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_named(choice) if isinstance(choice, NamedResponseTool) else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=_template_kwargs(body, chat_template),
    )


def new_response(body: ResponsesRequest, model: str, defaults: Mapping[str, float]) -> dict[str, Any]:
    """The response to `body` before anything has come of it: `protocol.responses_answer.ResponseObject`."""
    text_format = body.text.format if body.text is not None and body.text.format is not None else _PLAIN_TEXT
    return {
        "id": "resp_" + secrets.token_hex(24),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
        "text": {"format": text_format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": body.tool_choice.model_dump()
        if isinstance(body.tool_choice, NamedResponseTool)
        else body.tool_choice or "auto",
        "tools": [tool.model_dump(include=_SHOWN_OF_TOOLS) for tool in body.tools or ()],
        "top_logprobs": 0,
        "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


_PLAIN_TEXT = TextFormat(type="text")
_SHOWN_OF_TOOLS = {"type", "name", "description", "parameters", "strict"}

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
}
"""Field of a chat's request -> where it is in this one's."""


@contextmanager
def in_our_names() -> Iterator[None]:
    """Errors of the chat that is made of a request name the fields that the client used."""
    try:
        yield
    except RequestError as error:
        param, message = error.param or "", str(error)
        if param in _NAMES:
            for name, ours in _NAMES.items():
                if ours == _NAMES[param]:
                    message = message.replace(name, ours)
            raise RequestError(message, param=_NAMES[param], code=error.code) from error
        if param.startswith("tools[") and ".function" in param:
            ours = param.replace(".function", "", 1)
            message = message.replace(param, ours).replace(".function.", ".")
            raise RequestError(message, param=ours, code=error.code) from error
        raise


def _response_format(text_format: TextFormat | None) -> ResponseFormat | None:
    if text_format is None:
        return None
    if text_format.schema_ is None:
        return ResponseFormat(type=text_format.type)
    schema = JsonSchema(name=text_format.name, schema=text_format.schema_, strict=text_format.strict)
    return ResponseFormat(type=text_format.type, json_schema=schema)


def _tool(tool: ResponseTool) -> Tool:
    fields = {name: getattr(tool, name) for name in FunctionDefinition.model_fields}
    return Tool(type="function", function=FunctionDefinition(**fields))


def _named(choice: NamedResponseTool) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


def _template_kwargs(body: ResponsesRequest, chat_template: str) -> dict[str, Any] | None:
    """The template's switches, `reasoning.effort` among them if the template has it."""
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort is not None and _EFFORT in chat_template:
        return {_EFFORT: effort, **(body.chat_template_kwargs or {})}
    if effort not in (None, "none"):
        message = "reasoning.effort is not supported: this model's chat template has no such switch"
        raise _unsupported("reasoning.effort", message)
    return body.chat_template_kwargs


_EFFORT = "reasoning_effort"


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")


def _unsupported(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_parameter")
