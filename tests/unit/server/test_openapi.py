"""What /openapi.json says is true of the routes."""

from __future__ import annotations

from typing import Any

import pytest

from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.generation import SamplingRequest
from server.protocol.responses import ResponsesRequest
from tests.factories_engine import FakeEngine
from tests.factories_http import make_app


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    openapi: dict[str, Any] = make_app(FakeEngine()).openapi()
    return openapi


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if "$ref" in node else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = references(document)
    assert len(found) > 10
    for reference in found:
        node: Any = document
        for name in reference.removeprefix("#/").split("/"):
            node = node[name]


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1/completions", CompletionRequest),
        ("/v1/chat/completions", ChatCompletionRequest),
        ("/v1/responses", ResponsesRequest),
    ],
)
def test_the_body_is_described_field_by_field(
    document: dict[str, Any], path: str, model: type[SamplingRequest]
) -> None:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    assert set(schema["properties"]) == set(model.model_fields)
    assert all(each["description"] for each in schema["properties"].values())
    assert schema["properties"]["top_p"]["maximum"] == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_answers_in_full_as_a_stream_and_as_errors(document: dict[str, Any], path: str) -> None:
    responses = document["paths"][path]["post"]["responses"]
    content = responses["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    event = content["text/event-stream"]["schema"]  # as it is framed: the chunk is text in it
    assert event["properties"]["data"]["anyOf"][0]["contentMediaType"] == "application/json"
    assert event["required"] == ["data"]
    assert {"4XX", "5XX"} <= set(responses)


def test_no_route_is_described_as_fastapis_own_errors(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in str(document)


def test_the_key_is_described_where_it_is_needed(document: dict[str, Any]) -> None:
    assert "securitySchemes" not in document["components"]
    guarded = make_app(FakeEngine(), api_key=("k",)).openapi()
    assert guarded["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert guarded["security"] == [{"key": []}]
