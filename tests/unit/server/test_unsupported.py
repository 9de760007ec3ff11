"""No field that clients know is accepted and ignored."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from engine.errors import RequestError
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.generation import SamplingRequest
from server.protocol.responses import ResponsesRequest
from server.unsupported import UNSUPPORTED, UNSUPPORTED_RESPONSES, Unsupported, refuse_unsupported


def fields_of(module: Any, params: str = "CompletionCreateParamsBase") -> set[str]:
    return set(getattr(module, params).__annotations__) | {"stream"}


def refused_by(model: type[SamplingRequest]) -> Unsupported:
    return UNSUPPORTED_RESPONSES if model is ResponsesRequest else UNSUPPORTED


@pytest.mark.parametrize(
    ("known", "model"),
    [
        (fields_of(completion_create_params), CompletionRequest),
        (fields_of(chat_create_params), ChatCompletionRequest),
        (fields_of(response_create_params, "ResponseCreateParamsBase"), ResponsesRequest),
    ],
)
def test_every_field_of_the_openai_sdk_is_honoured_or_refused(known: set[str], model: type[SamplingRequest]) -> None:
    assert len(known) > 15
    assert known - set(model.model_fields) - set(refused_by(model)) == set()


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest, ResponsesRequest])
def test_what_is_honoured_is_not_refused(model: type[SamplingRequest]) -> None:
    assert set(model.model_fields) & set(refused_by(model)) == set()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_that_asks_for_something_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is not supported") as caught:
        refuse_unsupported({"prompt": "hi", name: "something"})
    assert caught.value.param == name
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(("name", "neutral"), [(name, value) for name, row in UNSUPPORTED.items() for value in row])
def test_a_value_that_asks_for_nothing_is_let_through(name: str, neutral: object) -> None:
    refuse_unsupported({name: neutral})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_null_asks_for_nothing(name: str) -> None:
    refuse_unsupported({name: None})


@pytest.mark.parametrize(
    "body",
    [
        {"use_beam_search": 0},
        {"length_penalty": True},
        {"length_penalty": 1.1},
        {"modalities": ["text", "audio"]},
    ],
)
def test_what_only_looks_like_nothing_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        refuse_unsupported(body)


def test_numbers_are_compared_as_json_has_them() -> None:
    refuse_unsupported({"length_penalty": 1.0, "stream_interval": 1.0})
