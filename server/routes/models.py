"""GET /v1/models, /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter

from server.errors import ModelNotFound
from server.openapi import ERROR_RESPONSES
from server.protocol.models import ModelCard, ModelList
from server.serving import Serving


def router(serving: Serving) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["Models"], responses=ERROR_RESPONSES)
    card = ModelCard(
        id=serving.model,
        created=serving.started_s,
        root=serving.root,
        max_model_len=serving.engine.info.max_model_len,
    )

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        """The models that are served: one."""
        return ModelList(data=[card])

    @routes.get("/v1/models/{model_id:path}")  # path: an id may have slashes, raw or as %2F
    async def get_model(model_id: str) -> ModelCard:
        """One model."""
        if model_id != card.id:
            raise ModelNotFound(f"the model {model_id[:100]!r} is not served here: {card.id!r} is", param="model")
        return card

    return routes
