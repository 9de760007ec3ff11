"""Mixed requests of which 30 % leave at a random moment: nothing is left of them, and nobody else has noticed.

Fifty, always; 500 with three times as many at a time are slow.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.process import Daemon

SHARE_LEAVING = 0.3
LATEST_LEAVE_S = 1.5
CANARY = {"prompt": "The quick brown fox jumps over", "max_tokens": 24, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Visit:
    """One request, and when its client leaves."""

    path: str
    body: dict[str, Any]
    leaves_after_s: float | None
    """None: it stays to the end."""


def make_visits(rng: random.Random, num_requests: int) -> list[Visit]:
    """Chat and completions, streamed and not, prompts of 1 to 400 tokens, many with a prefix in common."""
    leaving = [True] * int(num_requests * SHARE_LEAVING)
    leaving += [False] * (num_requests - len(leaving))
    rng.shuffle(leaving)
    return [_make_visit(rng, leaves) for leaves in leaving]


def _make_visit(rng: random.Random, leaves: bool) -> Visit:
    # Whoever leaves asks for more than can be done until then, so that all of them leave in the middle.
    body: dict[str, Any] = {"max_tokens": 2000 if leaves else rng.randint(1, 12), "ignore_eos": True}
    body |= {"temperature": rng.choice([0, 1]), "stream": rng.random() < 0.5}
    length = rng.choice([1, 8, 40, 40, 100, 400])
    if chat := rng.random() < 0.5:
        body["messages"] = [{"role": "user", "content": "word " * length + str(rng.random())}]
    else:
        body["prompt"] = [1000] * (length // 2) + [rng.randrange(1000, 32000) for _ in range(length - length // 2)]
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Visit(path, body, rng.uniform(0.0, LATEST_LEAVE_S) if leaves else None)


async def visit(client: httpx.AsyncClient, plan: Visit) -> bool:
    """Carry out one visit; True when it was left. Whoever stays must get a whole answer."""
    try:
        async with asyncio.timeout(plan.leaves_after_s):
            response = await client.post(plan.path, json=plan.body)
    except TimeoutError:
        return True
    assert response.status_code == 200, response.text
    if plan.body["stream"]:
        *payloads, done = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
        assert done == "[DONE]"
        assert json.loads(payloads[-1])["choices"][0]["finish_reason"] == "length"
    else:
        answer = response.json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == plan.body["max_tokens"]
    return False


async def all_visits(url: str, plans: list[Visit], num_clients: int) -> int:
    """Carry out all, so many at a time; how many were left."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_clients)
    queue = iter(plans)

    async def work() -> int:
        return sum([await visit(client, plan) for plan in queue])

    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120.0) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(work()) for _ in range(num_clients)]
    return sum(task.result() for task in tasks)


def canary(daemon: Daemon) -> str:
    response = httpx.post(f"{daemon.url}/v1/completions", json=CANARY, timeout=60.0)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["text"]
    return text


def ended(daemon: Daemon) -> dict[str, float]:
    """Requests that have ended so far, by how."""
    samples = daemon.samples("chairlift_requests_finished_total")
    return {reason: samples[key] for key in samples for reason in ("stop", "length", "abort", "error") if reason in key}


@pytest.mark.anyio
@pytest.mark.parametrize(("num_requests", "num_clients"), [(50, 16), pytest.param(500, 48, marks=pytest.mark.slow)])
async def test_nothing_is_left_of_those_who_leave(daemon: Daemon, num_requests: int, num_clients: int) -> None:
    text, before = canary(daemon), ended(daemon)
    plans = make_visits(random.Random(0), num_requests)
    num_left = await all_visits(daemon.url, plans, num_clients)
    assert num_left == num_requests * SHARE_LEAVING

    daemon.wait_idle(timeout_s=10.0)
    after = ended(daemon)
    assert after["error"] == before["error"]
    assert after["length"] - before["length"] == num_requests - num_left
    # Some leave while their request is still being read: the engine never hears of those.
    assert 0.8 * num_left < after["abort"] - before["abort"] <= num_left
    assert canary(daemon) == text
    daemon.wait_idle()
