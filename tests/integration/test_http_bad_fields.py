"""A bad value in every place of every body, in this process: what `tests/e2e/test_bad_fields.py` sends to a daemon.

Here a place has a few of its values only, and the next place the next ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

from server.unsupported import UNSUPPORTED, UNSUPPORTED_RESPONSES
from tests.e2e.bad_values import error_of, explains, others_for, wrong_for
from tests.e2e.places import BASES, MODEL, Json, Walk
from tests.factories_engine import Call, FakeEngine, Script, say
from tests.factories_http import make_app, make_client

pytestmark = pytest.mark.anyio

DOCUMENT = make_app(FakeEngine()).openapi()
WALK = Walk(DOCUMENT)
PLACES = {route: [place for place in WALK.places() if place.route == route] for route in BASES}
each_route = pytest.mark.parametrize("route", BASES)

EVERY = 6
"""Of the values for a place, one in this many is sent."""
HANG_S = 60.0
SEED = {"seed": 1}
"""Makes what an engine is asked for the same each time."""


def make_engine() -> FakeEngine:
    """One that says all that it was told: any difference shows."""

    def tell(call: Call) -> Script:
        return say(f"{call.prompt_token_ids} {call.params} {call.priority} {call.cache_salt!r}")

    return FakeEngine(tell, name=MODEL, max_model_len=10_000)


async def send(client: httpx.AsyncClient, route: str, body: Json) -> httpx.Response:
    content = json.dumps(body)  # httpx itself refuses what the server must
    with anyio.fail_after(HANG_S):
        return await client.post(route, content=content, headers={"content-type": "application/json"})


def said(answer: Any) -> Any:
    """An answer without what is new in each one."""
    if isinstance(answer, list):
        return [said(each) for each in answer]
    if isinstance(answer, dict):
        fresh = ("id", "created", "created_at", "completed_at")
        return {name: said(value) for name, value in answer.items() if name not in fresh}
    return answer


async def good_answer(client: httpx.AsyncClient, route: str) -> Any:
    response = await send(client, route, BASES[route] | SEED)
    assert response.status_code == 200, response.text
    return said(response.json())


def some(values: Iterator[Any], turn: int) -> list[Any]:
    return list(values)[turn % EVERY :: EVERY]


@each_route
async def test_a_bad_value_is_refused_by_name_and_harms_nothing(route: str) -> None:
    engine = make_engine()
    async with make_client(engine) as client:
        before = await good_answer(client, route)
        for turn, place in enumerate(PLACES[route]):
            for value in some(wrong_for(WALK, place), turn):
                response = await send(client, route, place.with_value(value))
                told = f"{place.name}{place.kind}: {value!r:.60}: {response.text[:300]}"
                assert 400 <= response.status_code < 500, told
                assert explains(error_of(response), place, value), told
            for value in (*some(others_for(WALK, place), turn), None):
                response = await send(client, route, place.with_value(value))
                told = f"{place.name}{place.kind}: {value!r:.60}: {response.text[:300]}"
                assert response.status_code in (200, 400, 404), told
                assert response.status_code == 200 or explains(error_of(response), place, value), told
            assert await good_answer(client, route) == before, place
    assert all(call.ended.is_set() for call in engine.calls)


@each_route
async def test_the_body_of_each_place_is_accepted(route: str) -> None:
    """Else what is wrong at the place would be refused for something else, and show nothing."""
    async with make_client(make_engine()) as client:
        for place in PLACES[route]:
            if place.name != "previous_response_id":  # none is kept
                response = await send(client, route, place.body)
                assert response.status_code == 200, (place.name, place.kind, response.text[:300])


@each_route
async def test_a_field_of_another_route_is_ignored_or_refused_by_name(route: str) -> None:
    """Never half taken: it changes nothing, or it is one of those that clients know and that we refuse."""
    refused = UNSUPPORTED_RESPONSES if route == "/v1/responses" else UNSUPPORTED if route.startswith("/v1/") else {}
    own = {place.path[0] for place in PLACES[route]}
    others = {
        place.path[0]: place.body[place.path[0]]
        for places in PLACES.values()
        for place in places
        if not place.is_nested and place.path[0] not in own
    }
    assert others
    async with make_client(make_engine()) as client:
        good = await good_answer(client, route)
        for name, value in others.items():
            response = await send(client, route, BASES[route] | SEED | {name: value})
            if name in refused and value not in refused[name]:
                assert response.status_code == 400
                error = error_of(response)
                assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            else:
                assert response.status_code == 200, (name, response.text)
                assert said(response.json()) == good, name
