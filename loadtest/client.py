"""Client: sends jobs to one server and records what comes back; asks it what it is."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import h11

from loadtest.record import Failure, RequestRecord
from loadtest.stream import StreamReader
from loadtest.target import Target
from loadtest.wire import exchange
from loadtest.workload import Job

INFO_TIMEOUT_S = 10.0


class ServerUnusable(Exception):
    """The server does not answer, or does not say what it serves."""


@dataclass(slots=True)
class Counters:
    """How far a run is; the live line reads it."""

    num_running: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_chunks: int = 0


class Client:
    """Sends jobs to `path` of one server."""

    def __init__(self, target: Target, path: str, *, timeout_s: float) -> None:
        self.counters = Counters()
        self._target = target
        self._path = path
        self._timeout_s = timeout_s

    async def send(self, job: Job, *, due_s: float | None = None) -> RequestRecord:
        """Send one request and read its stream to the end. A failure is part of the record; nothing is raised.

        Its clock starts at `due_s` (time.perf_counter()), so that a late start counts as waiting; by default, now.
        """
        started_s = time.perf_counter() if due_s is None else due_s
        record = RequestRecord(started_s=started_s, num_prompt_tokens=job.num_prompt_tokens)
        reader = StreamReader(record)
        self.counters.num_running += 1
        try:
            failure = await self._exchange(job, record, reader)
        finally:
            self.counters.num_running -= 1
        reader.close(time.perf_counter())
        record.failure = failure or record.failure
        self.counters.num_done += 1
        self.counters.num_failed += record.failure is not None
        return record

    async def _exchange(self, job: Job, record: RequestRecord, reader: StreamReader) -> Failure | None:
        def take(data: bytes, now_s: float) -> None:
            num_before = len(record.chunk_times_s)
            reader(data, now_s)
            self.counters.num_chunks += len(record.chunk_times_s) - num_before

        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await exchange(self._target, "POST", self._path, job.body, sink=take)
        except TimeoutError:
            return Failure("timeout", f"not done after {self._timeout_s:g} s")
        except OSError as error:
            return Failure("connection", str(error) or type(error).__name__)
        except h11.RemoteProtocolError as error:
            return Failure("truncated", str(error))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return Failure("bad stream", f"{type(error).__name__}: {error}")
        if reply.status != 200:
            return Failure(f"http {reply.status}", reply.body.decode(errors="replace")[:500])
        return None


async def first_model(target: Target) -> str:
    """The id of the first model the server lists. Raises ServerUnusable."""
    listing = await _get(target, "/v1/models")
    try:
        return str(listing["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise ServerUnusable(f"{target.url}/v1/models names no model: say which with --model") from None


async def server_version(target: Target) -> Any:
    """What the server's /version says, parsed; None when it has no such route."""
    try:
        return await _get(target, "/version")
    except ServerUnusable:
        return None


async def _get(target: Target, path: str) -> Any:
    try:
        async with asyncio.timeout(INFO_TIMEOUT_S):
            reply = await exchange(target, "GET", path)
    except (OSError, h11.RemoteProtocolError) as error:  # TimeoutError is an OSError
        raise ServerUnusable(f"{target.url} does not answer: {error or type(error).__name__}") from error
    if reply.status != 200:
        raise ServerUnusable(f"{target.url}{path} answers {reply.status}: {reply.body.decode(errors='replace')[:200]}")
    try:
        return json.loads(reply.body)
    except ValueError:
        raise ServerUnusable(f"{target.url}{path} does not answer in JSON") from None
