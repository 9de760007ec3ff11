"""Soak: thousands of varied requests, a fifth of them left by their clients, against a real process; is anything left?

    python -m tests.chaos.soak --requests 20000 [--model DIR]

Prints the process's memory, descriptors and threads along the way, and at the end what has grown since the first
fifth. Before each look the server is idle. Without --model it serves a tiny random one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.model import save_served_model
from tests.e2e.process import Daemon, running

SHARE_LEAVING = 0.2
NUM_CLIENTS = 16
NUM_LOOKS = 10
NUM_GRAMMARS = 40
SETTINGS = ("--num-threads", "1", "--log-level", "warning", "--kv-cache-tokens", "4096")
"""A small KV cache: its memory is counted where it is first written to, and requests are preempted now and then."""
CANARY = {"prompt": "The chairlift never stops", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Look:
    """The process while it is idle."""

    num_requests: int
    """How many it had answered."""
    rss_bytes: int
    num_fds: int
    num_threads: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Visit:
    """One request, and when its client leaves: never, or after so many lines of its stream (0: at once)."""

    path: str
    body: dict[str, Any]
    leaves_after: int | None


def visits(rng: random.Random, count: int) -> Iterator[Visit]:
    """Chats, completions, streams, lists of prompts, several choices, stops, logprobs, grammars, and bad requests."""
    for _ in range(count):
        leaves = rng.random() < SHARE_LEAVING
        body: dict[str, Any] = {
            "max_tokens": rng.choice([300, 600]) if leaves else rng.randint(1, 24),
            "temperature": rng.choice([0, 0.7, 1.3]),
            "stream": leaves or rng.random() < 0.5,
            "ignore_eos": leaves or rng.random() < 0.5,
        }
        text = " ".join(rng.choices(["riders", "get", "on", "and", "off", "缆车", "🚡"], k=rng.choice([1, 5, 20, 60])))
        if rng.random() < 0.5:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
        else:
            path, body["prompt"] = "/v1/completions", text
        body |= rng.choice(_extras(rng) if not leaves else [{}])
        yield Visit(path, body, rng.choice([0, 2, 10]) if leaves else None)


def _extras(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {},
        {},
        {"n": rng.randint(2, 4)},
        {"stop": ["the", "zz"]},
        {"top_p": 0.8, "top_k": 20, "min_p": 0.02},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 3}},
        {"structured_outputs": {"regex": f"[a-z]{{1,{1 + rng.randrange(NUM_GRAMMARS)}}}"}},
        {"temperature": -1},  # refused
        {"max_tokens": 10**6},  # refused
    ]


async def pay(client: httpx.AsyncClient, visit: Visit) -> None:
    """Carry out one visit. What is refused is refused with 400, all else is answered whole or left."""
    async with client.stream("POST", visit.path, json=visit.body) as response:
        assert response.status_code in (200, 400), response.status_code
        if visit.leaves_after is not None:
            lines = response.aiter_lines()
            for _ in range(visit.leaves_after):
                await anext(lines, None)
            return
        await response.aread()
        if visit.body["stream"] and response.status_code == 200:
            assert response.text.endswith("data: [DONE]\n\n"), response.text[-200:]


async def pay_all(url: str, plans: list[Visit]) -> None:
    """NUM_CLIENTS at a time."""
    queue = iter(plans)

    async def work() -> None:
        for plan in queue:
            await pay(client, plan)

    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client, asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(work())


def canary(daemon: Daemon) -> str:
    """A text that must always be the same."""
    response = httpx.post(f"{daemon.url}/v1/completions", json=CANARY, timeout=60.0)
    text: str = response.raise_for_status().json()["choices"][0]["text"]
    return text


def soak(daemon: Daemon, num_requests: int, seed: int = 0) -> list[Look]:
    """All requests in NUM_LOOKS parts, with a look before and after each; fails if blocks or the canary differ."""
    process, rng, started_s = psutil.Process(daemon.pid), random.Random(seed), time.monotonic()
    expected, looks = canary(daemon), []

    def look(count: int) -> None:
        daemon.wait_idle(timeout_s=30.0)
        assert canary(daemon) == expected
        daemon.wait_idle()
        elapsed_s = time.monotonic() - started_s
        looks.append(Look(count, process.memory_info().rss, process.num_fds(), process.num_threads(), elapsed_s))
        print(json.dumps({"rss_mib": round(looks[-1].rss_bytes / 2**20, 1)} | _plain(looks[-1])), flush=True)

    look(0)
    part = num_requests // NUM_LOOKS
    for i in range(NUM_LOOKS):
        asyncio.run(pay_all(daemon.url, list(visits(rng, part))))
        look((i + 1) * part)
    return looks


def _plain(look: Look) -> dict[str, float]:
    return {
        "requests": look.num_requests,
        "fds": look.num_fds,
        "threads": look.num_threads,
        "s": round(look.elapsed_s),
    }


def grown(looks: list[Look]) -> tuple[int, int, int]:
    """Bytes of memory, descriptors and threads that came since the first fifth: from a mean of looks to one."""
    warm, end = looks[NUM_LOOKS // 5 : NUM_LOOKS // 5 + 2], looks[-2:]

    def mean(part: list[Look]) -> int:
        return sum(each.rss_bytes for each in part) // len(part)

    return (
        mean(end) - mean(warm),
        end[-1].num_fds - max(each.num_fds for each in warm),
        end[-1].num_threads - max(each.num_threads for each in warm),
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--model", help="default: a tiny random one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(save_served_model(Path(folder) / "model"))
        log = Path(folder) / "log"
        with running(log, *SETTINGS, "--model", model) as daemon:
            rss, fds, threads = grown(soak(daemon, arguments.requests))
    print(f"grown since the first fifth: {rss / 2**20:.1f} MiB, {fds} descriptors, {threads} threads")


if __name__ == "__main__":
    main()
