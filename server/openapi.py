"""What /openapi.json and /docs say of routes that read their body and write their answer themselves.

The handlers take the bare request, since FastAPI's own parsing answers errors in another shape and a stream is no
model; so the schemas are put beside the routes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.protocol.base import ApiModel
from server.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from server.protocol.completions import Completion, CompletionChunk, CompletionRequest
from server.protocol.errors import ErrorEnvelope
from server.protocol.responses import ResponsesRequest
from server.protocol.responses_answer import DeletedResponse, ResponseEvent, ResponseObject
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is at fault", "model": ErrorEnvelope},
    "5XX": {"description": "The server is at fault, or has no room", "model": ErrorEnvelope},
}

_REQUESTS: tuple[type[ApiModel], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_ANSWERS: tuple[type[ApiModel], ...] = (
    Completion,
    CompletionChunk,
    ChatCompletion,
    ChatCompletionChunk,
    ResponseObject,
    ResponseEvent,
    DeletedResponse,
)


def generation_docs(
    request: type[ApiModel], full: type[ApiModel], chunk: type[ApiModel], *, example: dict[str, Any]
) -> dict[str, Any]:
    """What a completions route is documented with: arguments for its decorator. `example`: a body to try it with."""
    content = {
        "application/json": {"schema": _reference(full)},
        "text/event-stream": {"schema": _event(chunk)},
    }
    docs = body_docs(request, example=example)
    ok = {200: {"description": "In full, or with `stream` chunk by chunk", "content": content}}
    return docs | {"response_model": None, "responses": ok | docs["responses"]}


def body_docs(request: type[ApiModel], *, example: dict[str, Any]) -> dict[str, Any]:
    """What a route that reads its body itself is documented with. `example`: a body to try it with."""
    json_body = {"schema": _reference(request), "example": example}
    body = {"required": True, "content": {"application/json": json_body}}
    return {"openapi_extra": {"requestBody": body}, "responses": ERROR_RESPONSES}


def answer_docs(model: type[ApiModel]) -> dict[str, Any]:
    """What a route without a body is documented with that writes its answer, a `model`, itself."""
    ok = {200: {"description": "OK", "content": {"application/json": {"schema": _reference(model)}}}}
    return {"response_model": None, "responses": ok | ERROR_RESPONSES}


def openapi_of(app: FastAPI, *, needs_key: bool) -> Callable[[], dict[str, Any]]:
    """A function for `app.openapi`: FastAPI's document with the schemas of `generation_docs` in it."""

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            document["components"]["schemas"] |= _schemas()
            if needs_key:
                document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    return openapi


def _schemas() -> dict[str, Any]:
    modes = [(model, "validation") for model in _REQUESTS] + [(model, "serialization") for model in _ANSWERS]
    _, document = models_json_schema(modes, ref_template=_REF)  # type: ignore[arg-type]
    schemas: dict[str, Any] = document["$defs"]
    return schemas


def _event(chunk: type[ApiModel]) -> dict[str, Any]:
    """One event of a stream: what is in it is JSON as text."""
    as_json = {"type": "string", "contentMediaType": "application/json"}
    alternatives = [
        as_json | {"contentSchema": _reference(chunk)},
        as_json | {"contentSchema": _reference(ErrorEnvelope)},
        {"const": "[DONE]"},
    ]
    data = {"anyOf": alternatives, "description": "What has come; or what has failed, before the end; or the end"}
    event = {"type": "string", "description": "Its name. Of /v1/responses only"}
    return {"type": "object", "required": ["data"], "properties": {"event": event, "data": data}}


def _reference(model: type[ApiModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
