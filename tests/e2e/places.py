"""Every place of every body that the routes take, from the OpenAPI document, each in a body that is accepted.

    ChatCompletionRequest -> messages -> messages[0] -> messages[0].content -> messages[0].content[0].text ...

A new field is a new place, without a line here; but where a sample cannot be made of the schema alone, or a field needs
another beside it, SAMPLES and BESIDE say so, and a test fails until they do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Path = tuple[str | int, ...]

BASES: Mapping[str, Json] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}
"""The least bodies."""

SAMPLES: Mapping[str, Any] = {
    "ResponseFormat": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}},
    "TextFormat": {"type": "json_schema", "schema": {"const": 1}, "name": "one"},
    "StructuredOutputs": {"choice": ["a", "b"]},
    "ChatMessage": {"role": "user", "content": "Hi"},
    "FunctionDefinition": {"name": "now"},
    "NamedFunction": {"name": "now"},
    "NamedResponseTool": {"type": "function", "name": "now"},
    "ResponseTool": {"type": "function", "name": "now"},
    "FunctionCall": {"name": "now", "arguments": "{}"},
    "FunctionCallItem": {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"},
    "FunctionCallOutputItem": {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
    "ReasoningItem": {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]},
}
"""Schema -> a value, where one of its required members alone is refused, or means nothing."""

BEFORE: Mapping[str, list[Any]] = {
    "FunctionCallOutputItem": [SAMPLES["FunctionCallItem"]],
    "ReasoningItem": [{"role": "user", "content": "Hi"}],
}
"""Schema -> what comes before it in an array."""

TYPES = ("string", "integer", "number", "boolean", "array", "object")
"""JSON's, but for null."""

ANY_KEY = "1"
"""A name of a member, where all are right: a token's id is."""

MODEL = "tiny"
"""The name under which a model must be served."""

BESIDE: Mapping[str, Json] = {
    "model": {"model": MODEL},
    "timeout_ms": {"timeout_ms": 60_000},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tools": {"tool_choice": "required"},
    "/v1/completions top_logprobs": {},
    "/v1/chat/completions tool_choice": {"tools": [{"type": "function", "function": SAMPLES["FunctionDefinition"]}]},
    "/v1/responses tool_choice": {"tools": [SAMPLES["ResponseTool"]]},
    "/tokenize messages": {"prompt": None},
    "/tokenize tools": {"prompt": None, "messages": [SAMPLES["ChatMessage"]]},
    "messages[0].tool_calls": {"role": "assistant"},
    "structured_outputs.json": {"choice": None},
    "structured_outputs.regex": {"choice": None},
    "structured_outputs.grammar": {"choice": None, "grammar": 'start: "a"'},
}
"""Place, of all routes or of one -> what its object has beside it, and what it is there if its type does not say."""


@dataclass(frozen=True)
class Place:
    """A member or an element somewhere in a route's body."""

    route: str
    path: Path
    schema: Json
    """What may stand there. Its references are into the document."""
    body: Json
    """One that is accepted, with a sample at the place."""
    kind: str
    """Which of several shapes its objects have here, as their schemas' names."""

    @property
    def name(self) -> str:
        """As errors have it: `messages[0].content`."""
        return named(self.path)

    @property
    def is_nested(self) -> bool:
        """It is not a field of the body itself."""
        return len(self.path) > 1

    @property
    def is_of_map(self) -> bool:
        """Its name is any one."""
        return self.path[-1] == ANY_KEY

    def with_key(self, key: str) -> Json:
        """The body with its value under this name instead."""
        return _put(self.body, self.path[:-1], {key: _get(self.body, self.path)})

    def with_value(self, value: Any) -> Json:
        """The body with this value at the place instead."""
        return _put(self.body, self.path, value)


def named(path: Path) -> str:
    """A path as errors have it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


class Walk:
    """The places of one document."""

    def __init__(self, document: Json) -> None:
        self._paths = document["paths"]
        self._schemas = document["components"]["schemas"]

    def places(self) -> Iterator[Place]:
        """All places of all routes that take a body."""
        for route, methods in self._paths.items():
            if "requestBody" in methods.get("post", {}):
                schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
                yield from self._under(route, (), schema, BASES[route], "")

    def resolve(self, schema: Json) -> tuple[str, Json]:
        """A schema itself, and its name if it has one."""
        name = ""
        while "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[-1]
            schema = self._schemas[name]
        return name, schema

    def variants(self, schema: Json) -> Iterator[tuple[str, Json]]:
        """What a value may be: each alternative with its name, if it has one."""
        name, schema = self.resolve(schema)
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if alternatives is None:
            yield name, schema
            return
        for each in alternatives:
            yield from self.variants(each)

    def kinds(self, schema: Json) -> set[str]:
        """The JSON types that a schema lets through. A whole number is an integer, and a number as well."""
        found: set[str] = set()
        for _, each in self.variants(schema):
            found |= {each["type"]} if "type" in each else set(TYPES)
            if each.get("type") == "number":
                found.add("integer")
        return found

    def sample(self, schema: Json, name: str = "") -> Any:
        """A value that is right, as small as can be."""
        name = self.resolve(schema)[0] or name
        if name in SAMPLES:
            return copy.deepcopy(SAMPLES[name])
        name, schema = next(self.variants(schema))
        if name in SAMPLES:
            return copy.deepcopy(SAMPLES[name])
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        if schema["type"] == "object":
            members = {key: schema["properties"][key] for key in schema.get("required", ())}
            return {key: self.sample(member) for key, member in members.items()}
        if schema["type"] == "array":
            return [self.sample(schema["items"])] if schema.get("maxItems") != 0 else []
        return {"string": "x", "integer": 1, "number": 1, "boolean": False, "null": None}[schema["type"]]

    def _under(self, route: str, path: Path, schema: Json, body: Json, kind: str) -> Iterator[Place]:
        """The places under one, which holds a value already."""
        alternatives = list(self.variants(schema))
        arrays = [each["items"] for _, each in alternatives if each.get("type") == "array" and each["items"]]
        if arrays:
            yield from self._elements(route, path, {"anyOf": arrays}, body, kind)
        for name, each in alternatives:
            if each.get("type") != "object":
                continue
            label = f"{kind}/{name}" if name and len(alternatives) > 2 else kind
            if "properties" in each:
                before = _get(body, path)
                value = before if self._is_one(before, each) else self.sample(each, name)
                yield from self._members(route, path, each, _put(body, path, value), label)
            elif isinstance(each.get("additionalProperties"), dict):
                inner = each["additionalProperties"]
                yield from self._place(route, (*path, ANY_KEY), inner, _put(body, path, {}), label)

    def _members(self, route: str, path: Path, schema: Json, body: Json, kind: str) -> Iterator[Place]:
        for key, member in schema["properties"].items():
            yield from self._place(route, (*path, key), member, body, kind)

    def _elements(self, route: str, path: Path, items: Json, body: Json, kind: str) -> Iterator[Place]:
        """An array's only element, or its last, and what is under it; once for each kind that it may be of."""
        old = _get(body, path)
        alternatives = list(self.variants(items))
        for name, each in alternatives:
            before = BEFORE.get(name, [])
            is_one = isinstance(old, list) and self._is_one(old[0], each)
            filled = _put(body, path, [*before, old[0] if is_one else self.sample(each, name)])
            label = f"{kind}/{name or each['type']}" if len(alternatives) > 1 else kind
            place = Place(route, (*path, len(before)), items, filled, label)
            yield place
            yield from self._under(route, place.path, each, filled, label)

    def _place(self, route: str, path: Path, schema: Json, body: Json, kind: str) -> Iterator[Place]:
        """A member, and what is under it."""
        above = _get(body, path[:-1])
        name = named(path)
        above = copy.deepcopy(above | BESIDE.get(f"{route} {name}", BESIDE.get(name, {})))
        if above.get(path[-1]) is None:
            above[path[-1]] = self.sample(schema)
        filled = _put(body, path[:-1], above)
        yield Place(route, path, schema, filled, kind)
        yield from self._under(route, path, schema, filled, kind)

    def _is_one(self, value: Any, schema: Json) -> bool:
        """Whether an object is of this schema, among those that may stand in its place."""
        if not isinstance(value, dict) or schema["type"] != "object":
            return False
        wanted = schema.get("properties", {}).get("type", {})
        return set(schema.get("required", ())) <= value.keys() and value.get("type", wanted.get("const")) in (
            wanted.get("const"),
            *wanted.get("enum", ()),
        )


def _get(body: Any, path: Path) -> Any:
    for part in path:
        body = body[part]
    return body


def _put(body: Json, path: Path, value: Any) -> Any:
    """A copy of the body with this value there."""
    if not path:
        return copy.deepcopy(value)
    body = copy.deepcopy(body)
    _get(body, path[:-1])[path[-1]] = copy.deepcopy(value)
    return body
