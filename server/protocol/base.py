"""What all API models share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class ApiModel(BaseModel):
    """A JSON object of the API. Types are taken strictly ("5" is no number); unknown fields are ignored."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),  # fields may be called model_...
    )


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not true or false")
    return value


NoBoolean = BeforeValidator(_no_boolean)
"""For literal numbers: `True == 1` in Python, not in JSON."""


def documented(**schema: Any) -> Any:
    """A field that may be left out, with a range for readers of the schema.

    The range is shown, not checked: `SamplingParams` and `convert` do that, once, for whoever asks.
    """
    return Field(default=None, json_schema_extra=schema)
