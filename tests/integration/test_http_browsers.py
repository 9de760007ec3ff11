"""What web pages can do with the server, through the whole application."""

from __future__ import annotations

import pytest

from tests.factories_engine import FakeEngine
from tests.factories_http import make_client

pytestmark = pytest.mark.anyio

EVIL = {"Origin": "https://evil.example"}
CHAT = {"Origin": "https://chat.example.com"}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json"])
async def test_a_post_that_browsers_send_unasked_has_no_effect(content_type: str) -> None:
    engine = FakeEngine()
    async with make_client(engine) as client:
        headers = EVIL | {"Content-Type": content_type}
        response = await client.post("/v1/completions", content=b'{"prompt": "hi"}', headers=headers)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in response.headers
    assert engine.calls == []


async def test_a_name_that_was_made_to_mean_this_machine_is_not_answered() -> None:
    engine = FakeEngine()
    headers = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}  # of one origin, says the browser
    async with make_client(engine, allowed_hosts=()) as client:
        for response in [
            await client.post("/v1/completions", json={"prompt": "hi"}, headers=headers),
            await client.get("/v1/models", headers=headers),
            await client.get("/metrics", headers=headers),
        ]:
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "host_not_allowed"
            assert "--allowed-hosts evil.example" in response.json()["error"]["message"]
    assert engine.calls == []


async def test_cors_is_off_by_default() -> None:
    async with make_client() as client:
        preflight = await client.options("/v1/completions", headers=CHAT | PREFLIGHT)
        own = await client.get("/v1/models", headers={"Origin": "http://test"})
    assert preflight.status_code == 403
    assert own.status_code == 200
    assert not [name for name in [*preflight.headers, *own.headers] if name.startswith("access-control")]


async def test_an_allowed_page_may_ask_and_read_answers_and_errors() -> None:
    async with make_client(api_key=("k",), cors_allow_origins=("https://chat.example.com",)) as client:
        preflight = await client.options("/v1/completions", headers=CHAT | PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        key = {"Authorization": "Bearer k"}
        for headers, status in ((CHAT | key, 200), (CHAT, 401), (EVIL | key, 403)):
            response = await client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
            assert response.status_code == status
            allowed = response.headers.get("access-control-allow-origin")
            assert allowed == (CHAT["Origin"] if headers["Origin"] == CHAT["Origin"] else None)
            assert "access-control-allow-credentials" not in response.headers
        assert (await client.options("/v1/completions", headers=EVIL | PREFLIGHT)).status_code == 400
