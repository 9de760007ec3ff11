"""What may be put in a place of a body (`tests.e2e.places`): wrong for it, or right in itself but rare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from tests.e2e.places import Json, Place, Walk


def deep(depth: int) -> list[Any]:
    """An array in an array in an array ..."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


KINDS: Mapping[str, list[Any]] = {
    "string": ["", "x", "7", "y" * 5000],
    "integer": [7, -1, 10**30, -(10**400)],
    "number": [0.5, -1.5e300],
    "boolean": [True],
    "array": [[], [None], [[[[]]]], [{"a": 1}], list(range(3000)), deep(180)],
    "object": [{}, {"a": {"b": [1]}}, {str(i): i for i in range(500)}],
}
"""JSON type -> values of it."""

KEYS = ["", "-1", "x", "1.5", " 1", "1e3", "\u0663", "9" * 19, "9" * 30, "\ud83d", "k" * 5000]
"""Names of members, for maps."""

SCHEMAS: list[Json] = [
    {"type": 5},
    {"type": "nothing"},
    {"$ref": "#"},
    {"$ref": "#/$defs/none"},
    {"$ref": "http://127.0.0.1:1/schema.json"},
    {"properties": []},
    {"required": "all"},
    {"pattern": "("},
    {"type": "string", "pattern": "((a{0,999}){0,999}){0,999}"},
    {"enum": []},
    {"enum": list(range(5000))},
    {"anyOf": []},
    {"not": {}},
    {"type": "array", "items": {}, "minItems": 10**30},
    {"type": "array", "prefixItems": [{}] * 2000},
    {"type": "number", "multipleOf": 0},
    {"type": "integer", "minimum": 10**400},
    {"type": "string", "minLength": -1, "format": "nonsense"},
    {"type": "object", "properties": {str(i): {"type": "string"} for i in range(500)}},
    {"allOf": [{"type": "string"}, {"type": "number"}]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
]
"""Objects that are JSON schemas, or would be: for places that take any object. All may be refused, none breaks."""


def nested_schema(depth: int) -> Json:
    """A schema in a schema in a schema ..."""
    schema: Json = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def out_of_range(schema: Json) -> Iterator[Any]:
    """Values of the right type just outside the documented range."""
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"]
    if "maxLength" in schema:
        yield "z" * (schema["maxLength"] + 1)


def wrong_for(walk: Walk, place: Place) -> Iterator[Any]:
    """Values that the document does not let through."""
    allowed = walk.kinds(place.schema)
    for kind, values in KINDS.items():
        if kind not in allowed:
            yield from values
    shapes = [shape for _, shape in walk.variants(place.schema)]
    for shape in (place.schema, *shapes):
        yield from out_of_range(shape)
    texts = [shape for shape in shapes if shape.get("type") == "string"]
    if texts and all("enum" in shape or "const" in shape for shape in texts):
        yield from ("", "none of these")


def others_for(walk: Walk, place: Place) -> Iterator[Any]:
    """All else that is sent: right, or what only this model or this grammar cannot take."""
    allowed = walk.kinds(place.schema)
    for kind, values in KINDS.items():
        if kind in allowed:
            yield from values
    yield from ("\ud83d", float("nan"))
    if any(shape.get("additionalProperties") is True for _, shape in walk.variants(place.schema)):
        yield from (*SCHEMAS, *map(nested_schema, (30, 90)))


def error_of(response: httpx.Response) -> Json:
    """The error of a response, which has the one shape that errors have."""
    body = response.json()
    assert body.keys() == {"error"}
    error: Json = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def names(error: Json, place: Place) -> bool:
    """Whether it says the place: itself, a member of it, or what it is in and then which part of that."""
    param, message = error["param"] or "", error["message"]
    if param.startswith(place.name):
        return True
    last = next(part for part in reversed(place.path) if isinstance(part, str))
    return bool(param) and place.name.startswith(param) and (last in message or place.name in message)


def explains(error: Json, place: Place, value: Any) -> bool:
    """Whether a refusal of this value leads to the place; where it is not about the place alone, to what it is in."""
    if value in (None, []) and place.name in error["message"]:  # as if it were not there: what needs it is named
        return True
    if error["code"] == "context_length_exceeded":  # of all that the prompt is made of
        return error["param"] in ("prompt", "messages", "input") or names(error, place)
    if error["param"] == "tools" and "the parameters of 'now'" in error["message"]:  # the engine knows it by its name
        return place.path[0] == "tools"
    if error["code"] == "invalid_json":  # the parser counts lines and columns; we say the field of the body
        return bool(error["param"] == place.path[0])
    return names(error, place)
