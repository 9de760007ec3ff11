"""What a text must be: the two fields that say so."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from engine.params import MAX_GRAMMAR_LEN
from server.protocol.base import ApiModel, JsonObject, Many, OnlyFalse


def _as_schema(value: Any) -> Any:
    """A schema may be sent as text."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_GRAMMAR_LEN:
        raise ValueError(f"structured_outputs.json must be at most {MAX_GRAMMAR_LEN} characters long, got {len(value)}")
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json must be a JSON schema, and is not even JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError("structured_outputs.json must be a JSON schema, an object")
    return schema


Schema = Annotated[JsonObject, BeforeValidator(_as_schema, json_schema_input_type=dict[str, Any] | str)]


class JsonSchema(ApiModel):
    """A schema with its name."""

    name: str | None = None
    """For the client's own records."""
    description: str | None = None
    """For the client's own records: the model is told of the schema by the prompt only, but can write nothing else."""
    schema_: JsonObject = Field(alias="schema")
    """JSON Schema, draft 2020-12. What cannot be held to is refused, never left out."""
    strict: bool | None = None
    """The schema is always followed."""


class ResponseFormat(ApiModel):
    """What the text must be, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    """`text`: anything. `json_object`: any JSON object."""
    json_schema: JsonSchema | None = None
    """With the type `json_schema` only, which needs it."""


class StructuredOutputs(ApiModel):
    """What the text must be, as vLLM has it: exactly one of these."""

    json_: Schema | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression for the whole text, in Rust's syntax: no look-around, no back-references."""
    choice: Many[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar in llguidance's variant of Lark; `start` is where it starts."""
    whitespace_pattern: None = None
    """Not supported: there is at most one space after a colon or comma."""
    disable_any_whitespace: OnlyFalse | None = None
    """Not supported."""
    disable_additional_properties: OnlyFalse | None = None
    """Not supported: say `additionalProperties` in the schema."""
    structural_tag: None = None
    """Not supported."""
