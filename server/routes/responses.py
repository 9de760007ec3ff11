"""POST /v1/responses; GET, DELETE and POST .../cancel by id."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from engine.errors import RequestError
from server.admission import take_over
from server.disconnect import while_connected
from server.errors import ResponseNotFound
from server.openapi import answer_docs, generation_docs
from server.protocol.responses import ResponsesRequest
from server.protocol.responses_answer import DeletedResponse, ResponseEvent, ResponseObject
from server.requestlog import log_background
from server.responses.framing import NamedEvents
from server.responses.items import parse_items
from server.responses.making import Making
from server.responses.request import check, in_our_names, new_response, to_chat
from server.responses.store import Conversation, Stored
from server.routes.answer import generate, read_counted, take_place
from server.serving import Serving
from server.sse import event_stream
from server.unsupported import UNSUPPORTED_RESPONSE_QUERY, UNSUPPORTED_RESPONSES, refuse_unsupported


def router(serving: Serving) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["Generation"])
    example = {"input": "Why is the sky blue?", "max_output_tokens": 64}
    docs = generation_docs(ResponsesRequest, ResponseObject, ResponseEvent, example=example)

    @routes.post("/v1/responses", **docs)
    async def create_response(request: Request) -> Response:
        """Go on with a conversation: with a message, thoughts, calls of tools."""
        body = await read_counted(request, serving, ResponsesRequest, UNSUPPORTED_RESPONSES)
        with in_our_names():
            return await _create(serving, request, body)

    @routes.get("/v1/responses/{response_id}", **answer_docs(ResponseObject))
    async def get_response(request: Request, response_id: str) -> Response:
        """A response that is kept, or is made in the background."""
        refuse_unsupported(request.query_params, UNSUPPORTED_RESPONSE_QUERY)
        return _as_it_stands(_find(serving, request, response_id))

    @routes.delete("/v1/responses/{response_id}", **answer_docs(DeletedResponse))
    async def delete_response(request: Request, response_id: str) -> Response:
        """Keep a response no more. One that is made in the background ends."""
        found = _find(serving, request, response_id)
        if isinstance(found, Making):
            await serving.jobs.cancel(found)
        serving.responses.drop(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @routes.post("/v1/responses/{response_id}/cancel", **answer_docs(ResponseObject))
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End a response that is made in the background. One that has ended already stays as it is."""
        found = _find(serving, request, response_id)
        if isinstance(found, Making):
            await serving.jobs.cancel(found)
        elif not found.is_background:
            message = "only a response in the background can be cancelled: to end another, close its connection"
            raise RequestError(message, param="response_id")
        return _as_it_stands(found)

    return routes


async def _create(serving: Serving, request: Request, body: ResponsesRequest) -> Response:
    check(body, keeps_responses=serving.responses.is_on)
    began_s = time.monotonic()
    owner = _owner(request)
    stored = _stored(serving, body.previous_response_id, owner)
    num_bytes = len(await request.body())  # it has been read
    if stored is not None:  # it is tokenised too
        num_bytes += len(stored.conversation)
    place = take_place(request, serving, num_choices=1, num_bytes=num_bytes, max_tokens=body.max_output_tokens)
    earlier = Conversation() if stored is None else Conversation.of(stored)
    chat = to_chat(body, earlier.items, parse_items(body.input), chat_template=serving.engine.tokenizer.chat_template)
    work = await serving.converter.chat(chat)

    def keep(response: dict[str, Any]) -> None:
        if response["store"]:
            serving.responses.put(response["id"], Stored.of(owner, response, before=[*earlier.raw, *body.input]))

    making = Making(
        new_response(body, serving.model, serving.engine.info.sampling_defaults),
        work,
        serving.converter,
        owner=owner,
        keep=keep,
        request_id=request.state.request_id,
    )
    chunks = generate(request, serving, work, place)
    if body.background:
        state = request.scope["state"]

        def ended() -> None:
            release()
            log_background(state, began_s, making.generated())

        serving.jobs.start(making, chunks, on_end=ended)
        release = take_over(request.scope)  # else it would end with this answer
        return JSONResponse(making.response)
    request.state.report = making.generated
    if body.stream:
        return await event_stream(request, making.stream(chunks), NamedEvents())
    full = asyncio.create_task(making.full(chunks))
    await while_connected(request.receive, full)
    return JSONResponse(full.result())


def _stored(serving: Serving, response_id: str | None, owner: str) -> Stored | None:
    """The response that a request goes on from, if it does. Raises RequestError and ResponseNotFound."""
    if response_id is None:
        return None
    if serving.jobs.get(response_id, owner) is not None:
        raise RequestError("the previous response has not ended yet", param="previous_response_id")
    if (stored := serving.responses.get(response_id, owner)) is None:
        raise ResponseNotFound(
            f"previous_response_id is {response_id[:100]!r}, which is not kept here (any more)",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored


def _owner(request: Request) -> str:
    """Whose responses these are: the API key's, or everyone's on a server without keys."""
    return str(getattr(request.state, "key_id", ""))


def _find(serving: Serving, request: Request, response_id: str) -> Making | Stored:
    """A response of who asks: one that is made in the background, or is kept. Raises ResponseNotFound."""
    owner = _owner(request)
    if (found := serving.jobs.get(response_id, owner) or serving.responses.get(response_id, owner)) is None:
        message = f"there is no response {response_id[:100]!r} here: it was never kept, or is not any more"
        raise ResponseNotFound(message, param="response_id")
    return found


def _as_it_stands(found: Making | Stored) -> Response:
    if isinstance(found, Making):
        return JSONResponse(found.response)
    return Response(found.response, media_type="application/json")
