"""POST /tokenize, /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.body import read_body
from server.openapi import body_docs
from server.protocol.tokenize import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from server.serving import Serving


def router(serving: Serving) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["Tokens"])

    @routes.post("/tokenize", **body_docs(TokenizeRequest, example={"prompt": "Hello!"}))
    async def tokenize(request: Request) -> TokenizeAnswer:
        """What a prompt or a conversation is to the model."""
        tokens = await serving.converter.tokenize(await read_body(request, TokenizeRequest))
        return TokenizeAnswer(tokens=tokens, count=len(tokens), max_model_len=serving.engine.info.max_model_len)

    @routes.post("/detokenize", **body_docs(DetokenizeRequest, example={"tokens": [1, 2, 3]}))
    async def detokenize(request: Request) -> DetokenizeAnswer:
        """What tokens are to a reader."""
        return DetokenizeAnswer(prompt=await serving.converter.detokenize(await read_body(request, DetokenizeRequest)))

    return routes
