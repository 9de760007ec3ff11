"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.openapi import generation_docs
from server.protocol.completions import Completion, CompletionChunk, CompletionRequest
from server.render import CompletionShape
from server.routes.answer import admit, answer, read_counted
from server.serving import Serving


def router(serving: Serving) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["Generation"])
    shape = CompletionShape()

    example = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}

    @routes.post("/v1/completions", **generation_docs(CompletionRequest, Completion, CompletionChunk, example=example))
    async def create_completion(request: Request) -> Response:
        """Go on from a text."""
        body = await read_counted(request, serving, CompletionRequest)
        place = await admit(request, serving, body, num_prompts=len(body.prompt))
        work = await serving.converter.completion(body)
        return await answer(request, serving, body, work, shape, place)

    return routes
