"""The daemon as a process: what a supervisor, an operator and a client see when it starts, stops and dies."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.process import Daemon, running, spawn

END_TIMEOUT_S = 20.0  # on a busy machine; Python takes a second of it to take torch apart
FAIL_TIMEOUT_S = 60.0


def complete(url: str) -> str:
    """A short greedy completion."""
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["text"]
    return text


def read_stream(url: str, *, max_tokens: int, after_three: Callable[[], None]) -> list[str]:
    """Stream a completion; its events' payloads. `after_three` is called when three have come."""
    body = {
        "prompt": "Once upon a time",
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "max_tokens": max_tokens,
    }
    payloads: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30.0) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                payloads.append(line.removeprefix("data: "))
                if len(payloads) == 3:
                    after_three()
    return payloads


def test_sigterm_in_the_stream_lets_it_finish(tmp_path: Path) -> None:
    with running(tmp_path / "log") as daemon:
        *_, last, done = read_stream(daemon.url, max_tokens=40, after_three=lambda: daemon.signal(signal.SIGTERM))
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert daemon.wait(END_TIMEOUT_S) == 0, daemon.log
        assert "Traceback" not in daemon.log


@pytest.mark.slow  # it starts twice
def test_kill_in_the_stream_then_start_again(tmp_path: Path) -> None:
    """The client hears of the death at once; the same port serves the same text again."""
    with running(tmp_path / "first") as daemon:
        text = complete(daemon.url)
        with pytest.raises(httpx.TransportError):
            read_stream(daemon.url, max_tokens=4000, after_three=lambda: daemon.signal(signal.SIGKILL))
        assert daemon.wait(END_TIMEOUT_S) == -signal.SIGKILL
    with running(tmp_path / "second", port=daemon.port) as again:
        assert complete(again.url) == text


@pytest.mark.slow  # `tests/unit/server/test_daemon.py` does it always, with an engine that is a fake
def test_sigterm_ends_an_idle_one_with_zero(tmp_path: Path) -> None:
    with running(tmp_path / "log") as daemon:
        complete(daemon.url)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(END_TIMEOUT_S) == 0, daemon.log
        assert "Traceback" not in daemon.log


def test_sigterm_while_loading_exits_with_zero(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "log")
    try:
        daemon.wait_alive()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(END_TIMEOUT_S) == 0, daemon.log
    finally:
        daemon.kill()


def test_a_port_in_use_is_said_in_one_line_before_the_model_loads(daemon: Daemon, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert spawn(log, "--port", str(daemon.port)).wait(FAIL_TIMEOUT_S) == 1
    [line] = log.read_text().splitlines()
    assert f"port {daemon.port} on 127.0.0.1 is in use" in line
    assert "--port" in line


def test_an_unknown_model_is_said_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert spawn(log, "--port", "0", "--model", str(tmp_path / "nowhere")).wait(FAIL_TIMEOUT_S) == 1
    last = log.read_text().splitlines()[-1]
    assert last.startswith("chairlift: ")
    assert "nowhere" in last
    assert "Traceback" not in log.read_text()
