"""One bad field at a time, for every field of every route with a body: 4xx with its name, and nobody else notices.

Fields and their types come from the models, so a new field is looked at without a line here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.responses import ResponsesRequest
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tests.e2e.process import Daemon

ROUTES: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "Hi", "max_tokens": 1}),
    ("/v1/chat/completions", ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    ("/v1/responses", ResponsesRequest, {"input": "Hi", "max_output_tokens": 16}),
    ("/tokenize", TokenizeRequest, {"prompt": "Hi"}),
    ("/detokenize", DetokenizeRequest, {"tokens": [1, 2]}),
]
FIELDS = [
    pytest.param(path, name, schema, body, id=f"{path}-{name}")
    for path, model, body in ROUTES
    for name, schema in model.model_json_schema()["properties"].items()
]
VALUES: Mapping[str, list[Any]] = {
    "string": ["", "x", "7", "y" * 5000],
    "integer": [7, -1, 10**30],
    "number": [0.5, -1e300],
    "boolean": [True],
    "array": [[], [None], [[[[]]]], [{"a": 1}], list(range(3000))],
    "object": [{}, {"a": {"b": [1]}}, {str(i): i for i in range(500)}],
}


def kinds(schema: Any, definitions: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema lets through."""
    if "$ref" in schema:
        return kinds(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    if "anyOf" in schema:
        return set().union(*(kinds(each, definitions) for each in schema["anyOf"]))
    if "type" not in schema:
        return {"string"} if "enum" in schema or "const" in schema else set(VALUES)
    return {schema["type"], "integer"} if schema["type"] == "number" else {schema["type"]}


def out_of_range(schema: Any) -> Iterator[Any]:
    """Values of the right type just outside the documented range."""
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"]
    if "maxLength" in schema:
        yield "z" * (schema["maxLength"] + 1)


class Neighbour:
    """A stream that runs again and again, and must say the same each time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.texts: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        body = {"prompt": "Mountains are", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        while not self._stop.is_set() or not self.texts:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60.0) as response:
                self.texts.append("".join(line for line in response.iter_lines() if '"text"' in line))


def parts_that_stay(line: str) -> str:
    """A stream's text, without ids and times."""
    return "".join(piece.split('"', 1)[0] for piece in line.split('"text":"')[1:])


@pytest.fixture(scope="module")
def neighbour(daemon: Daemon) -> Iterator[Neighbour]:
    with Neighbour(daemon.url) as running:
        yield running
    texts = {parts_that_stay(text) for text in running.texts}
    assert len(texts) == 1, "a bad request changed another one's text"
    assert len(texts.pop()) > 50


@pytest.mark.parametrize(("path", "name", "schema", "body"), FIELDS)
@pytest.mark.usefixtures("neighbour")
def test_a_bad_field_is_refused_by_name(
    daemon: Daemon, path: str, name: str, schema: dict[str, Any], body: dict[str, Any]
) -> None:
    model = next(model for route, model, _ in ROUTES if route == path)
    allowed = kinds(schema, model.model_json_schema().get("$defs", {}))
    wrong = [value for kind, values in VALUES.items() if kind not in allowed for value in values]
    wrong += [value for each in [schema, *schema.get("anyOf", [])] for value in out_of_range(each)]
    with httpx.Client(base_url=daemon.url, timeout=60.0) as client:

        def send(value: Any) -> httpx.Response:
            content = json.dumps(body | {name: value})  # httpx itself refuses what the server must
            return client.post(path, content=content, headers={"content-type": "application/json"})

        for value in wrong:
            response = send(value)
            assert 400 <= response.status_code < 500, (value, response.text[:300])
            error = response.json()["error"]
            assert (error["param"] or "").startswith(name) or name in error["message"], (value, error)
        for value in [*(value for values in VALUES.values() for value in values), "\ud83d", float("nan")]:
            response = send(value)
            ran_out = name == "timeout_ms" and response.status_code == 504
            assert response.status_code < 500 or ran_out, (value, response.text[:300])
        if "null" in allowed and name not in body:
            assert send(None).status_code == 200
