"""The API's page: all of it comes from the server."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import pytest

from tests.factories_http import make_client

pytestmark = pytest.mark.anyio


async def test_the_page_has_nothing_from_elsewhere() -> None:
    async with make_client() as client:
        page = await client.get("/docs")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "//" not in page.text
        assert "<script>" not in page.text
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        paths = [urljoin("/docs", link) for link in links if not link.startswith("data:")]
        assert paths == ["/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/docs/page.js"]
        types = []
        for path in paths:
            file = await client.get(path)
            assert file.status_code == 200
            types.append(file.headers["content-type"].partition(";")[0])
        assert types == ["text/css", "text/javascript", "text/javascript"]
        assert 'url: "openapi.json"' in file.text
        assert (await client.get("/openapi.json")).json()["openapi"].startswith("3.")


async def test_its_policy_keeps_all_else_out() -> None:
    async with make_client() as client:
        policy = (await client.get("/docs")).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy


async def test_there_is_no_other_page() -> None:
    async with make_client() as client:
        for path in ("/redoc", "/docs/oauth2-redirect", "/docs/favicon.png", "/docs/../pyproject.toml"):
            assert (await client.get(path)).status_code == 404
