"""The fields that say what the text must be, down to the grammar that they make."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from engine.errors import RequestError
from engine.params import MAX_GRAMMAR_LEN, GrammarSpec
from server.body import explain
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.structured import grammar_of

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}


def grammar(model: type[ChatCompletionRequest | CompletionRequest] = CompletionRequest, **fields: Any) -> Any:
    """The grammar of a request with these fields, as it would be read from a body. Raises RequestError."""
    prompt = {"prompt": "hi"} if model is CompletionRequest else {"messages": []}
    try:
        body = model.model_validate(prompt | fields)
    except ValueError as error:
        raise explain(error) from None  # type: ignore[arg-type]
    return grammar_of(body.response_format, body.structured_outputs)


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA} | fields}


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": json_schema()}, "json_schema", SCHEMA),
        ({"response_format": json_schema(strict=False, description="x")}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", ""),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "text"}}, "choice", ["a"]),
    ],
)
def test_what_is_asked_for(model: Any, fields: dict[str, Any], kind: str, text: object) -> None:
    spec = grammar(model, **fields)
    assert spec.kind == kind
    assert (spec.text if isinstance(text, str) else json.loads(spec.text)) == text
    assert spec.param.partition(".")[0] in fields


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert grammar(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {}}, "response_format.type", "is required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"response_format": json_schema() | {"type": "text"}}, "response_format.json_schema", "is for the type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        ({"response_format": json_schema(schema=[])}, "response_format.json_schema.schema", "an object"),
        (
            {"response_format": json_schema(schema={"x": "y" * MAX_GRAMMAR_LEN})},
            "response_format.json_schema.schema",
            "characters",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "not empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "a string"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not even JSON"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "an object"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json", "an object"),
        ({"structured_outputs": {"json": "[" * 10_000}}, "structured_outputs.json", "not even JSON"),
        ({"structured_outputs": {"structural_tag": {}, "regex": "a"}}, "structured_outputs.structural_tag", "null"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "both",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        grammar(**fields)
    assert caught.value.param == param


def test_the_schema_of_a_pydantic_model_is_one() -> None:
    class Person(BaseModel):
        name: str
        age: int

    spec = grammar(response_format={"type": "json_schema", "json_schema": {"schema": Person.model_json_schema()}})
    assert spec == GrammarSpec("json_schema", json.dumps(Person.model_json_schema()))
