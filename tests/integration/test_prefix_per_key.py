"""Whose prompts are reused for whom: by the salt that the engine gets."""

from __future__ import annotations

import pytest

from tests.factories_engine import FakeEngine
from tests.factories_http import make_client

pytestmark = pytest.mark.anyio


async def salts(route: str = "/v1/completions", **settings: bool) -> dict[tuple[str, str], str]:
    """By API key and `cache_salt` of the request."""
    engine = FakeEngine()
    pairs = [(key, salt) for key in ("alice", "bob") for salt in ("", "x")]
    async with make_client(engine, api_key=("alice", "bob"), **settings) as client:
        for key, salt in pairs:
            body = {"input" if route == "/v1/responses" else "prompt": "hi", "cache_salt": salt}
            response = await client.post(route, json=body, headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == 200
    return dict(zip(pairs, [call.cache_salt for call in engine.calls], strict=True))


async def test_by_default_keys_share() -> None:
    assert await salts() == {(key, salt): salt for key in ("alice", "bob") for salt in ("", "x")}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/responses"])
async def test_by_flag_they_do_not_and_a_salt_divides_further(route: str) -> None:
    by_request = await salts(route, prefix_cache_per_key=True)
    assert len(set(by_request.values())) == 4
    assert by_request == await salts(route, prefix_cache_per_key=True)  # each finds its own again
    assert not any(key in salt for (key, _), salt in by_request.items())


async def test_no_salt_of_a_client_is_anothers() -> None:
    alices = (await salts(prefix_cache_per_key=True))["alice", ""]
    engine = FakeEngine()
    async with make_client(engine, api_key=("alice", "bob"), prefix_cache_per_key=True) as client:
        for guess in (alices, alices.rstrip("/")):
            body = {"prompt": "hi", "cache_salt": guess}
            await client.post("/v1/completions", json=body, headers={"Authorization": "Bearer bob"})
    assert len(engine.calls) == 2
    assert alices not in {call.cache_salt for call in engine.calls}
