"""The real daemon as a child process: started from the command line, watched through HTTP, ended by signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300.0  # the first start on a machine fetches the default model
POLL_S = 0.05


class Daemon:
    """A running `chairlift serve` with the default model."""

    def __init__(self, log: Path, *arguments: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._http = httpx.Client(timeout=10.0, headers={"Connection": "close"})  # each new one costs 30 ms
        self._process = spawn(log, "--port", str(self.port), *arguments)

    def wait_ready(self) -> None:
        """Wait until it answers requests; fails with its log when it does not come to that."""
        wait_until(lambda: self._says_200("/ready"), START_TIMEOUT_S, "the daemon is not ready", poll_s=0.2)

    def wait_alive(self) -> None:
        """Wait until its port answers, be the model loaded or not."""
        wait_until(lambda: self._says_200("/live"), START_TIMEOUT_S, "the daemon is not alive")

    @property
    def pid(self) -> int:
        """The process's."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def signal(self, signum: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(signum)

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; returns its exit status, negative for a signal's."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """End it now, if it runs."""
        self._process.kill()
        self._process.wait()
        self._http.close()

    def _says_200(self, path: str) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"the daemon has ended with status {self._process.returncode}:\n{self.log}")
        try:
            return self._http.get(f"{self.url}{path}").status_code == 200
        except httpx.TransportError:
            return False

    def scrape(self) -> bytes:
        """What /metrics says now."""
        response = self._http.get(f"{self.url}/metrics")
        response.raise_for_status()
        return response.content

    def gauge(self, name: str) -> float:
        """The value of a metric that has one series."""
        [value] = self.samples(name).values()
        return value

    def samples(self, name: str) -> Mapping[frozenset[str], float]:
        """The value of each series of a metric, by its labels' values."""
        families = text_string_to_metric_families(self.scrape().decode())
        found = [sample for family in families for sample in family.samples if sample.name == name]
        return {frozenset(sample.labels.values()): sample.value for sample in found}

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until no request runs or waits and no KV block is held."""
        names = ("chairlift_requests_running", "chairlift_requests_waiting", "chairlift_kv_cache_usage_ratio")
        wait_until(lambda: all(self.gauge(name) == 0 for name in names), timeout_s, "the engine is not idle")


@contextmanager
def running(log: Path, *arguments: str, port: int | None = None) -> Iterator[Daemon]:
    """A daemon that is ready; killed at the end, if it still runs."""
    daemon = Daemon(log, *arguments, port=port)
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.kill()


def spawn(log: Path, *arguments: str, prepare: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
    """Start `chairlift serve` with these arguments, and nothing from this process's settings.

    `prepare` is called in the child before it becomes the server: to set limits.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHAIRLIFT_")}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "server", "serve", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=prepare,  # noqa: PLW1509 - it sets limits, and takes no locks
        )


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, *, poll_s: float = POLL_S) -> None:
    """Poll until `condition` holds; fails with `what` when it has not by the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} after {timeout_s:g} s")
        time.sleep(poll_s)
