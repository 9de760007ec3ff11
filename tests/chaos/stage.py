"""A whole server in this process, over a fake model that can be held at any step, and what must be so after each act.

Real are the sockets, uvicorn, the application, AsyncEngine with its thread, scheduler and blocks; only the model is a
pure function of its tokens. So a scenario can stand still at a moment (in the queue, in a prefill, at the last token),
and every request's events can be counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from config.describe import assemble
from config.schema import SchedulerConfig
from engine import faults as made_faults
from engine.client import AsyncEngine
from engine.core import EngineCore
from engine.isolation import IsolatingRunner
from engine.messages import Failed, Finished, StepReport
from engine.plan import StepPlan, StepResult
from engine.scheduler import Scheduler
from engine.text.tokenizer import Tokenizer
from server.app import create_app
from server.connections import connection_class
from tests.factories import FakeRunner, make_info, make_manager
from tests.factories_text import hf_byte_level

BLOCK_SIZE = 4
MAX_NUM_SEQS = 4
BUDGET = 16
DEADLINE_S = 15.0
LONG = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
CANARY = {"prompt": [7, 8, 9, 10, 11], "max_tokens": 10, "temperature": 0, "ignore_eos": True}


class FakeSampler:
    """What a fault in `sample` is put around."""

    def sample(self) -> None:
        """The fake model samples by itself."""


class HeldRunner(FakeRunner):
    """A fake model that stands still before a step when it is told to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampler = FakeSampler()
        self._permits = threading.Semaphore(0)
        self._is_held = False
        self.num_reached = 0
        """Steps that were begun."""

    def hold(self) -> None:
        """No further step, until `let` or `release`."""
        self._is_held = True

    def let(self, count: int) -> None:
        """Let so many steps through."""
        self._permits.release(count)

    def release(self) -> None:
        """All steps may go."""
        self._is_held = False
        self._permits.release()

    def launch(self, plan: StepPlan) -> FakeRunner:
        self.num_reached += 1
        if self._is_held:
            assert self._permits.acquire(timeout=DEADLINE_S), "nobody released the model"
        return super().launch(plan)

    def collect(self) -> StepResult:
        self.sampler.sample()
        return super().collect()


@dataclass
class Stage:
    """The running server, its inner parts, and what has been counted."""

    engine: AsyncEngine
    core: EngineCore
    runner: HeldRunner
    port: int
    connections: set[Any]
    """uvicorn's, of those that are open."""
    submitted: list[int] = field(default_factory=list)
    ends: Counter[int] = field(default_factory=Counter)
    before: Remains | None = None
    canary: str = ""

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30, limits=limits) as client:
            yield client

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A completion over a connection of its own."""
        reader, writer = await self.connect()
        writer.write(raw_post(body))
        await writer.drain()
        return reader, writer

    def send_and_stop(self, **body: Any) -> socket.socket:
        """A completion of a client that reads nothing, and whose kernel takes little."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.connect(("127.0.0.1", self.port))
        client.sendall(raw_post(body))
        return client

    async def complete(self, **body: Any) -> httpx.Response:
        """A completion, whole."""
        async with self.client() as client:
            return await client.post("/v1/completions", json=body)

    async def get_canary(self) -> str:
        response = await self.complete(**CANARY)
        text: str = response.raise_for_status().json()["choices"][0]["text"]
        return text

    def make_faults(self, *faults: str) -> None:
        """From now on, passes counted from now."""
        for observer in made_faults.observers(faults):
            self.engine.add_observer(observer)
        made_faults.install(
            faults,
            scheduler=self.core.scheduler,
            runner=self.runner,
            sampler=self.runner.sampler,
            tokenizer=self.engine.tokenizer,
        )

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that other threads and tasks do."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what}") from None

    async def step_until(self, condition: Callable[[], bool], what: str) -> None:
        """Let the held model do step after step, until something is so that the steps bring about."""
        while not condition():
            reached = self.runner.num_reached
            self.runner.let(1)
            await self.until(lambda reached=reached: self.runner.num_reached > reached, f"a step, until {what}")  # type: ignore[misc]

    def on_report(self, report: StepReport) -> None:
        self.ends.update(event.request_id for event in report.events if isinstance(event, Finished | Failed))

    async def check_invariants(self) -> None:
        """What must be so after each scenario; the module's promise."""
        self.runner.release()
        stats = lambda: self.engine.stats  # noqa: E731
        await self.until(lambda: stats().num_running == stats().num_waiting == 0, "no request runs or waits")
        await self.until(lambda: set(self.submitted) == set(self.ends), "each accepted request has ended")
        assert await self.get_canary() == self.canary, "the canary's text has changed"
        await self.until(lambda: stats().num_used_blocks == 0, "all blocks are free")
        await self.until(lambda: set(self.submitted) == set(self.ends), "each accepted request has ended")
        assert set(self.ends.values()) == {1}, "a request has ended twice"
        self.core.check_integrity()
        assert self.engine._streams == {}
        await self._check_counters()
        assert self.before is not None
        before = self.before
        try:
            await self.until(lambda: Remains.now().is_within(before), "nothing is left")
        except AssertionError as error:
            left = f"{Remains.now()}, before: {before}; tasks: {asyncio.all_tasks()}"
            raise AssertionError(f"{error}: {left}") from None

    async def _check_counters(self) -> None:
        async with self.client() as client:
            families = list(text_string_to_metric_families((await client.get("/metrics")).text))
        values = {
            sample.name + "".join(sorted(sample.labels.get(name, "") for name in ("reason",))): sample.value
            for family in families
            for sample in family.samples
        }
        ended = sum(value for name, value in values.items() if name.startswith("chairlift_requests_finished_total"))
        assert ended == len(self.submitted), "the counters of ends do not add up"
        assert values["chairlift_requests_running"] == values["chairlift_requests_waiting"] == 0
        assert values["chairlift_kv_cache_usage_ratio"] == 0


@dataclass(frozen=True)
class Remains:
    """What a scenario may leave behind: as much as was there before."""

    threads: tuple[str, ...]
    num_tasks: int
    num_fds: int

    @classmethod
    def now(cls) -> Remains:
        # The threads of bounded pools stay for the next who wants one: asyncio's, and AnyIO's (of templates).
        pools = ("asyncio_", "AnyIO worker thread")
        names = sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith(pools))
        return cls(tuple(names), len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")))

    def is_within(self, before: Remains) -> bool:
        no_thread_more = not (Counter(self.threads) - Counter(before.threads))
        return no_thread_more and self.num_tasks <= before.num_tasks and self.num_fds <= before.num_fds


def raw_post(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """A request as bytes."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def reset(writer: asyncio.StreamWriter) -> None:
    """Leave with RST."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def leave(writer: asyncio.StreamWriter) -> None:
    """Leave with FIN."""
    writer.close()


_hf_tokenizer = cache(hf_byte_level)


def _make_core(num_blocks: int) -> tuple[EngineCore, HeldRunner, Tokenizer]:
    tokenizer = Tokenizer(_hf_tokenizer())  # one of its own: faults are put around it
    config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET)
    scheduler = Scheduler(config, make_manager(num_blocks, BLOCK_SIZE))
    runner = HeldRunner(BLOCK_SIZE, num_blocks)
    info = make_info(
        max_model_len=num_blocks * BLOCK_SIZE,
        vocab_size=tokenizer.vocab_size,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
    )
    return EngineCore(scheduler, IsolatingRunner(runner, BLOCK_SIZE), info), runner, tokenizer


@asynccontextmanager
async def staged(*, num_blocks: int = 64, **settings: Any) -> AsyncIterator[Stage]:
    """A running stage. `settings`: by name."""
    core, runner, tokenizer = _make_core(num_blocks)
    engine = AsyncEngine(lambda: (core, tokenizer))
    await engine.load()
    given = assemble(settings)
    app = create_app(given, engine)
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(
        app, http=connection_class(given.server), ws="none", log_config=None, timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([sock]))
    stage = Stage(engine, core, runner, sock.getsockname()[1], server.server_state.connections)
    engine.add_observer(stage.on_report)
    submit = core.submit
    core.submit = lambda message: (stage.submitted.append(message.request_id), submit(message))[1]  # type: ignore[method-assign]
    try:
        yield stage
    finally:
        runner.release()
        server.should_exit = True
        await serving
        await engine.close()


async def take_bearings(stage: Stage, warm_up: dict[str, Any] | None = None) -> None:
    """Note what there is before the scenario, and once `warm_up` is answered: the canary's text, what is held."""
    async with stage.client() as client:
        await client.post("/tokenize", json={"prompt": "x" * 20_000})  # starts the worker thread
        await client.post("/v1/completions", json={**CANARY, "stream": True})  # and sse-starlette's one task
        if warm_up is not None:
            await client.post("/v1/completions", json=warm_up)
    stage.canary = await stage.get_canary()
    await stage.until(lambda: stage.engine.stats.num_used_blocks == 0, "all blocks are free")
    await settled()
    stage.before = Remains.now()


async def settled() -> None:
    """Until as many tasks and descriptors are there as a moment ago: connections are being taken down."""
    last = None
    while last != (last := Remains.now()):  # noqa: ASYNC110 - nobody tells of it
        await asyncio.sleep(0.05)


Scenario = Callable[[Stage], Awaitable[None]]


async def act(scenario: Scenario, *, warm_up: dict[str, Any] | None = None, **settings: Any) -> None:
    """Play a scenario, and check. `warm_up`: a request that starts what stays."""
    async with staged(**settings) as stage:
        await take_bearings(stage, warm_up)
        await scenario(stage)
        await stage.check_invariants()
