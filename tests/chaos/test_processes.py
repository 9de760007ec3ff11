"""What needs a process of its own: hangs, limits of the system, and the time that others take meanwhile.

The model is a tiny random one. `tests/e2e/test_process.py` has signals, SIGKILL and a port in use, with the real model.
"""

from __future__ import annotations

import json
import resource
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.model.cache import ModelCache
from tests.chaos.model import save_served_model
from tests.chaos.soak import canary
from tests.e2e.process import Daemon, running, spawn, wait_until
from tests.unit.engine.model.gguf_files import write_gguf

END_TIMEOUT_S = 60.0
ARGUMENTS = ("--num-threads", "1", "--kv-cache-tokens", "4096")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_served_model(tmp_path_factory.mktemp("model") / "model"))


@contextmanager
def serving(log: Path, model: str, *arguments: str) -> Iterator[Daemon]:
    with running(log, "--model", model, *ARGUMENTS, *arguments) as daemon:
        yield daemon


def ask(daemon: Daemon, **body: Any) -> httpx.Response:
    """A completion of many tokens."""
    body = {"prompt": "riders", "max_tokens": 200, "ignore_eos": True} | body
    return httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=END_TIMEOUT_S)


def health(daemon: Daemon) -> int:
    return httpx.get(f"{daemon.url}/health", timeout=10.0).status_code


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "phase", ["launch", *(pytest.param(each, marks=SLOW) for each in ("schedule", "collect", "sample"))]
)
def test_a_step_that_hangs(tmp_path: Path, model: str, phase: str) -> None:
    """503 within the stall timeout; the open stream gets an error, the process a status, the log the stacks."""
    faults = ("--faults", f"{phase}:hang@50", "--stall-timeout", "2", "--stall-grace", "2")
    with serving(tmp_path / "log", model, *faults) as daemon, ThreadPoolExecutor(2) as pool:
        assert health(daemon) == 200
        stream = pool.submit(ask, daemon, stream=True)
        wait_until(lambda: daemon.gauge("chairlift_step_in_progress_seconds") > 0.5, 30.0, "no step hangs")
        full = pool.submit(ask, daemon)
        wait_until(lambda: health(daemon) == 503, 30.0, "it is said to be healthy")
        *_, last, done = [line for line in stream.result().text.splitlines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert done == "data: [DONE]"
        assert full.result().status_code == 500
        assert daemon.wait(END_TIMEOUT_S) == 1
        assert "the engine hangs" in daemon.log
        assert "in _turn_until_stopped" in daemon.log  # the engine thread's stack
        assert "in strike" in daemon.log


def test_an_event_loop_that_hangs(tmp_path: Path, model: str) -> None:
    faults = ("--faults", "deliver:hang@50", "--stall-timeout", "2", "--stall-grace", "1")
    with serving(tmp_path / "log", model, *faults) as daemon:
        with pytest.raises(httpx.TransportError):
            ask(daemon)
        assert daemon.wait(END_TIMEOUT_S) == 1
        assert "the event loop hangs" in daemon.log
        assert "in _on_report" in daemon.log


@SLOW  # `tests/unit/server/test_watchdog.py` has them always, with a clock of its own
def test_slow_steps_are_no_hang(tmp_path: Path, model: str) -> None:
    """Each step takes half of what is allowed, the first of them too, and there are many for one prompt."""
    faults = ("--faults", "launch:slow=1@1x6", "--stall-timeout", "2", "--stall-grace", "0")
    budget = ("--max-num-batched-tokens", "64")
    with serving(tmp_path / "log", model, *faults, *budget) as daemon, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, daemon, prompt=[5] * 300, max_tokens=8)
        while not answer.done():
            assert health(daemon) == 200
            time.sleep(0.1)
        assert answer.result().status_code == 200


def test_an_engine_that_dies_ends_the_process(tmp_path: Path, model: str) -> None:
    with serving(tmp_path / "log", model, "--faults", "schedule:raise@50") as daemon:
        assert ask(daemon).status_code == 500
        assert daemon.wait(END_TIMEOUT_S) == 1
        assert "the engine thread died" in daemon.log


def test_a_prompt_for_which_there_is_no_memory(tmp_path: Path, model: str) -> None:
    """It fails each time it comes, and its neighbours' texts are what they were."""
    with serving(tmp_path / "log", model, "--faults", "launch:oom@1x0?42") as daemon, ThreadPoolExecutor(8) as pool:
        before = canary(daemon)
        prompts = [[first, 5, 6] for first in (41, 42, 43, 44)] * 4
        answers = list(pool.map(lambda prompt: ask(daemon, prompt=prompt, max_tokens=20), prompts))
        assert [answer.status_code for answer in answers] == [200, 500, 200, 200] * 4
        assert "not enough memory" in answers[1].json()["error"]["message"]
        assert canary(daemon) == before
        daemon.wait_idle()
        assert health(daemon) == 200


SLOW_STEPS = ("--faults", "launch:slow=0.2@1x1000")


@contextmanager
def streaming(log: Path, model: str, *arguments: str) -> Iterator[tuple[Daemon, Future[list[str]]]]:
    """A server, and what will be the lines of a stream that would take minutes; it has begun."""

    def read() -> list[str]:
        body = {"prompt": "riders", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=END_TIMEOUT_S) as response:
            return [line for line in response.iter_lines() if line]

    with serving(log, model, *SLOW_STEPS, *arguments) as daemon, ThreadPoolExecutor(1) as pool:
        lines = pool.submit(read)
        wait_until(lambda: daemon.gauge("chairlift_requests_running") == 1, 30.0, "no stream runs")
        yield daemon, lines


def test_answers_that_outlast_the_shutdown(tmp_path: Path, model: str) -> None:
    """A stream has what was made within the grace period, then an error and [DONE]; what had no byte yet gets a status
    that SDKs ask again for. Nothing has died: the code says so, and the process ends well."""
    grace = ("--shutdown-timeout", "2")
    with streaming(tmp_path / "log", model, *grace) as (daemon, lines), ThreadPoolExecutor(1) as pool:
        full = pool.submit(ask, daemon)
        wait_until(lambda: daemon.gauge("chairlift_requests_running") == 2, 30.0, "it does not run")
        daemon.signal(signal.SIGTERM)
        *texts, last, done = lines.result()
        assert len(texts) > 5
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("service_unavailable", "stopping")
        assert done == "data: [DONE]"
        answer = full.result()
        assert (answer.status_code, answer.json()["error"]) == (503, error)
        assert answer.headers["retry-after"] == "5"
        assert daemon.wait(END_TIMEOUT_S) == 0, daemon.log
        assert "engine_dead" not in daemon.log


@SLOW  # `tests/unit/server/test_daemon.py` does it always, with an engine that is a fake
def test_a_second_signal_does_not_wait_for_streams(tmp_path: Path, model: str) -> None:
    with streaming(tmp_path / "log", model, "--shutdown-timeout", "60") as (daemon, lines):
        daemon.signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{daemon.url}/ready").status_code == 503, 10.0, "it does not drain")
        assert not lines.done()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(10.0) == 128 + signal.SIGTERM
        assert isinstance(lines.exception(), httpx.TransportError)


def test_a_full_disk_for_the_model_cache(tmp_path: Path) -> None:
    """A line that names the folder, nothing half made, and the next start makes it good."""
    gguf, cache, log = tmp_path / "tiny.gguf", tmp_path / "cache", tmp_path / "log"
    write_gguf(gguf)
    arguments = ("--model", str(gguf), "--cache-dir", str(cache), *ARGUMENTS)

    def fill_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))  # files cannot grow beyond

    assert spawn(log, "--port", "0", *arguments, prepare=fill_disk).wait(END_TIMEOUT_S) == 1
    last = log.read_text().splitlines()[-1]
    assert last.startswith("chairlift: --cache-dir: cannot write"), log.read_text()
    assert "Traceback" not in log.read_text()
    assert [path.name for path in ModelCache(cache).path("x").parent.iterdir() if "lock" not in path.name] == []
    with running(tmp_path / "again", *arguments) as daemon:
        assert ask(daemon, prompt=[5], max_tokens=2).status_code == 200


@SLOW  # `tests/conformance/test_serving.py` asks it always, of one prompt
def test_health_answers_while_huge_prompts_are_read(tmp_path: Path, model: str) -> None:
    """10 MB each: refused by their beginning, or read whole to be counted. p99 of /health stays below 100 ms."""
    huge = "the chairlift never stops " * (10 * 2**20 // 26)
    with serving(tmp_path / "log", model, "--max-queued-tokens", "100000000") as daemon, ThreadPoolExecutor(3) as pool:
        before = canary(daemon)
        jobs = [pool.submit(ask, daemon, prompt=huge) for _ in range(6)]
        jobs.append(pool.submit(httpx.post, f"{daemon.url}/tokenize", json={"prompt": huge}, timeout=END_TIMEOUT_S))
        took_s: list[float] = []
        with httpx.Client(base_url=daemon.url) as client:
            while len(took_s) < 200 or not all(job.done() for job in jobs):
                started_s = time.monotonic()
                assert client.get("/health", timeout=10.0).status_code == 200
                took_s.append(time.monotonic() - started_s)
                time.sleep(0.01)
        assert [job.result().status_code for job in jobs] == [400] * 6 + [200]
        p99_s = statistics.quantiles(took_s, n=100)[98]
        assert p99_s < 0.1, f"p99 {p99_s * 1000:.0f} ms of {len(took_s)}, most {max(took_s) * 1000:.0f} ms"
        assert canary(daemon) == before
