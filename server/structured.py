"""`response_format` and `structured_outputs` -> the grammar that the engine holds the output to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import RequestError
from engine.params import GrammarSpec
from server.protocol.structured import ResponseFormat, StructuredOutputs

_KINDS: dict[str, Callable[[Any], GrammarSpec | None]] = {
    "json_": lambda schema: GrammarSpec.json_schema(schema, param="structured_outputs.json"),
    "json_object": lambda asked: GrammarSpec("json_object", param="structured_outputs.json_object") if asked else None,
    "regex": lambda regex: GrammarSpec("regex", regex, "structured_outputs.regex"),
    "choice": lambda choices: GrammarSpec.choice(choices, param="structured_outputs.choice"),
    "grammar": lambda grammar: GrammarSpec("lark", grammar, "structured_outputs.grammar"),
}
"""The fields of `structured_outputs`, and what each asks for."""


def grammar_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> GrammarSpec | None:
    """The grammar; None if the output is free. Raises RequestError for fields that contradict each other."""
    by_format = None if response_format is None else _of_response_format(response_format)
    by_outputs = None if structured_outputs is None else _of_structured_outputs(structured_outputs)
    if by_format is not None and by_outputs is not None:
        raise _invalid("structured_outputs", "structured_outputs and response_format both say what the text must be")
    return by_format or by_outputs


def _of_response_format(given: ResponseFormat) -> GrammarSpec | None:
    if (given.type == "json_schema") != (given.json_schema is not None):
        needs = "is required with" if given.type == "json_schema" else "is for"
        raise _invalid("response_format.json_schema", f'response_format.json_schema {needs} the type "json_schema"')
    if given.json_schema is not None:
        return GrammarSpec.json_schema(given.json_schema.schema_, param="response_format.json_schema.schema")
    return GrammarSpec("json_object", param="response_format") if given.type == "json_object" else None


def _of_structured_outputs(given: StructuredOutputs) -> GrammarSpec:
    wanted = [
        spec
        for name, make in _KINDS.items()
        if (value := getattr(given, name)) is not None and (spec := make(value)) is not None
    ]
    if len(wanted) != 1:
        message = "structured_outputs needs exactly one of json, json_object, regex, choice and grammar"
        raise _invalid("structured_outputs", message)
    return wanted[0]


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
