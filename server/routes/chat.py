"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.openapi import generation_docs
from server.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from server.render import ChatShape
from server.routes.answer import admit, answer, read_counted
from server.serving import Serving


def router(serving: Serving) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["Generation"])
    shape = ChatShape()

    example = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}
    docs = generation_docs(ChatCompletionRequest, ChatCompletion, ChatCompletionChunk, example=example)

    @routes.post("/v1/chat/completions", **docs)
    async def create_chat_completion(request: Request) -> Response:
        """Answer the last message of a conversation."""
        body = await read_counted(request, serving, ChatCompletionRequest)
        place = await admit(request, serving, body)
        work = await serving.converter.chat(body)
        return await answer(request, serving, body, work, shape, place)

    return routes
