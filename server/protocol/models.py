"""GET /v1/models."""

from __future__ import annotations

from typing import Literal

from server.protocol.base import ApiModel


class ModelCard(ApiModel):
    """A model that is served."""

    id: str
    """What to send as `model`."""
    object: Literal["model"] = "model"
    created: int
    """When it was loaded, in seconds since 1970."""
    owned_by: str = "chairlift"
    root: str
    """What was loaded: an alias, a Hugging Face id or a path."""
    max_model_len: int
    """Longest prompt plus output, in tokens."""


class ModelList(ApiModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
