"""What all API models share."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


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


def documented(**schema: Any) -> Any:
    """A field that may be left out, with a range for readers of the schema.

    The range is shown, not checked: `SamplingParams` and `convert` do that, once, for whoever asks.
    """
    return Field(default=None, json_schema_extra=schema)


def exactly(expected: bool | int) -> BeforeValidator:
    """For a `Literal` of this one value: `False == 0` in Python, and so to pydantic's literals, but not in JSON."""

    def check(value: Any) -> Any:
        if value == expected and isinstance(value, bool) is not isinstance(expected, bool):
            raise PydanticCustomError("literal_error", "not the one value", {"expected": repr(expected)})
        return value

    return BeforeValidator(check)


OnlyFalse = Annotated[Literal[False], exactly(False)]
"""For what can only be switched off here."""


_T = TypeVar("_T")

Many = Annotated[list[_T], Field(fail_fast=True)]
"""A list of which the first wrong entry is told, as everywhere, and no other looked for: there may be thousands."""


def _as_integer(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def as_integers(values: list[Any]) -> list[Any]:
    """The same with its whole numbers as integers. Without floats, thousands of ids cost next to nothing."""
    return list(map(_as_integer, values)) if float in set(map(type, values)) else values


def _as_integers_if_list(value: Any) -> Any:
    return as_integers(value) if isinstance(value, list) else value


Integer = Annotated[int, BeforeValidator(_as_integer)]
"""1.0 is an integer in JSON Schema, and what languages write that have one kind of numbers."""

Integers = Annotated[Many[int], BeforeValidator(_as_integers_if_list)]


def _check_finite(value: dict[str, Any]) -> dict[str, Any]:
    rest: list[Any] = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, float) and not math.isfinite(part):
            raise PydanticCustomError("finite_json", "made of finite numbers")
        if isinstance(part, dict | list):
            rest += part.values() if isinstance(part, dict) else part
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_check_finite)]
"""An object of any kind. A number like 1e999 is infinite by the time it is read, and JSON cannot say that back."""
