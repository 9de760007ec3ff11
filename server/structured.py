"""`response_format` and `structured_outputs` -> the grammar that the engine holds the output to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import RequestError
from engine.params import GrammarSpec
from server.protocol.structured import ResponseFormat, StructuredOutputs

_RESPONSE_FORMAT = "response_format"
_STRUCTURED_OUTPUTS = "structured_outputs"

_KINDS: dict[str, Callable[[Any], GrammarSpec | None]] = {
    "json_": lambda schema: GrammarSpec.json_schema(schema, param=_STRUCTURED_OUTPUTS),
    "json_object": lambda wanted: GrammarSpec("json_object", param=_STRUCTURED_OUTPUTS) if wanted else None,
    "regex": lambda regex: GrammarSpec("regex", regex, _STRUCTURED_OUTPUTS),
    "choice": lambda choices: GrammarSpec.choice(choices, param=_STRUCTURED_OUTPUTS),
    "grammar": lambda grammar: GrammarSpec("lark", grammar, _STRUCTURED_OUTPUTS),
}
"""The fields of `structured_outputs`, and what each asks for."""


def grammar_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> GrammarSpec | None:
    """The grammar; None if the output is free. Raises RequestError for fields that contradict each other."""
    by_format = None if response_format is None else _of_response_format(response_format)
    by_outputs = None if structured_outputs is None else _of_structured_outputs(structured_outputs)
    if by_format is not None and by_outputs is not None:
        raise _invalid(_STRUCTURED_OUTPUTS, "structured_outputs and response_format both say what the text must be")
    return by_format or by_outputs


def _of_response_format(given: ResponseFormat) -> GrammarSpec | None:
    if (given.type == "json_schema") != (given.json_schema is not None):
        needs = "is required with" if given.type == "json_schema" else "is for"
        raise _invalid("response_format.json_schema", f'response_format.json_schema {needs} the type "json_schema"')
    if given.json_schema is not None:
        return GrammarSpec.json_schema(given.json_schema.schema_, param=_RESPONSE_FORMAT)
    return GrammarSpec("json_object", param=_RESPONSE_FORMAT) if given.type == "json_object" else None


def _of_structured_outputs(given: StructuredOutputs) -> GrammarSpec:
    wanted = [
        spec
        for name, make in _KINDS.items()
        if (value := getattr(given, name)) is not None and (spec := make(value)) is not None
    ]
    if len(wanted) != 1:
        raise _invalid(_STRUCTURED_OUTPUTS, "structured_outputs needs exactly one of json, regex, choice and grammar")
    return wanted[0]


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
