"""The /metrics route, and the counting of responses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, HTTPException

from server.metrics import CountResponses, Metrics, router
from tests.metrics_factory import PretendEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    metrics = Metrics(PretendEngine())
    app = FastAPI()
    app.include_router(router(metrics))
    app.add_middleware(CountResponses, metrics=metrics)

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, str]:
        if name == "unknown":
            raise HTTPException(404)
        return {"id": name}

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def test_a_scrape(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'chairlift_requests_running{model_name="fake"} 0.0' in response.text


async def test_openmetrics_by_content_negotiation(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_responses_are_counted_by_the_routes_template_not_by_what_clients_ask_for(
    client: httpx.AsyncClient,
) -> None:
    for path in ("/v1/models/a", "/v1/models/b", "/v1/models/unknown", "/made/up", "/made/up/too"):
        await client.get(path)
    lines = [
        line
        for line in (await client.get("/metrics")).text.splitlines()
        if line.startswith("chairlift_http_responses_total{")
    ]
    assert lines == [
        'chairlift_http_responses_total{model_name="fake",route="/v1/models/{name}",status="200"} 2.0',
        'chairlift_http_responses_total{model_name="fake",route="/v1/models/{name}",status="404"} 1.0',
        'chairlift_http_responses_total{model_name="fake",route="none",status="404"} 2.0',
    ]
