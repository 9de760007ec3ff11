"""What the server says of itself."""

from __future__ import annotations

from typing import Literal

from server.protocol.base import ApiModel


class Status(ApiModel):
    """It is well."""

    status: Literal["ok"] = "ok"


class Version(ApiModel):
    """What runs here."""

    version: str
    """Chairlift's own."""
    model: str
    dtype: str
    device: str
    kernels: str
    torch: str
    transformers: str


class Welcome(ApiModel):
    """For those who open the server's address."""

    name: Literal["chairlift"] = "chairlift"
    version: str
    model: str
    api: Literal["/v1"] = "/v1"
    """What OpenAI clients take as the end of their base URL."""
    documentation: Literal["/docs"] = "/docs"
