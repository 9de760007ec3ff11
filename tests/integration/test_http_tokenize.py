"""/tokenize and /detokenize: what the generating routes would make of a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.factories_engine import FakeEngine
from tests.factories_http import make_client

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hi"}, [2, *ids("hi")]),
        ({"prompt": ""}, [2]),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"prompt": "hi", "add_special_tokens": False, "model": "fake/model"}, ids("hi")),
        ({"messages": [USER]}, ids("<user>hi\n<assistant>")),
        ({"messages": [USER], "add_generation_prompt": False}, ids("<user>hi\n")),
        ({"messages": [USER], "continue_final_message": True, "add_special_tokens": True}, [2, *ids("<user>hi")]),
        ({"prompt": "x" * 5000}, [2, *ids("x" * 5000)]),  # far beyond the context: it is only counted
    ],
)
async def test_tokenize(body: dict[str, Any], tokens: list[int]) -> None:
    async with make_client() as client:
        response = await client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    assert response.json() == {"tokens": tokens, "count": len(tokens), "max_model_len": 64}


async def test_they_are_the_tokens_that_a_chat_has() -> None:
    engine = FakeEngine()
    async with make_client(engine) as client:
        tokens = (await client.post("/tokenize", json={"messages": [USER]})).json()["tokens"]
        await client.post("/v1/chat/completions", json={"messages": [USER]})
    assert engine.calls[0].prompt_token_ids == tokens


async def test_detokenize_says_special_tokens_too() -> None:
    async with make_client() as client:
        assert (await client.post("/detokenize", json={"tokens": [2, *ids("hé")]})).json() == {"prompt": "\x02hé"}
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
    ],
)
async def test_what_is_refused_names_its_field(path: str, body: dict[str, Any], param: str) -> None:
    async with make_client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_only_the_served_model_is_found(path: str) -> None:
    async with make_client() as client:
        response = await client.post(path, json={"model": "gpt-4", "prompt": "a", "tokens": []})
    assert response.status_code == 404
