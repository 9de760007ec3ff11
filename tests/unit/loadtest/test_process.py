"""Servers that a comparison starts: ready when they have answered, gone when it is over."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from loadtest.client import ServerUnusable, first_model
from loadtest.process import started
from loadtest.target import Target
from loadtest.workload import LoadSpec
from tests.unit.loadtest.sse_server import Received, plain, serve

pytestmark = pytest.mark.anyio

ONE = LoadSpec(num_requests=1, input_len=4, output_len=1, spread=0)

SERVER = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    refused = 0

    def do_GET(self):
        self.answer(200, json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if Handler.refused < 2:  # it lists its model before it is loaded
            Handler.refused += 1
            self.answer(503, "loading")
        else:
            text = json.dumps({"choices": [{"index": 0, "text": " a", "finish_reason": "length"}]})
            self.answer(200, f"data: {text}\\n\\ndata: [DONE]\\n\\n")

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        print(self.command, status, flush=True)

    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def target() -> Target:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Target("127.0.0.1", free.getsockname()[1])


async def test_it_is_ready_when_a_request_has_succeeded_and_gone_at_the_end(target: Target, tmp_path: Path) -> None:
    script, log = tmp_path / "server.py", tmp_path / "log"
    script.write_text(SERVER)
    async with started(f"{sys.executable} {script} {target.port}", target, ONE, log=log, timeout_s=30):
        assert await first_model(target) == "tiny"
        assert log.read_text().count("POST 503") == 2
        assert log.read_text().count("POST 200") == 1
    with pytest.raises(ServerUnusable, match="does not answer"):
        await first_model(target)


async def test_a_comparison_that_is_told_to_end_stops_them(target: Target, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    arguments = ["--a", target.url, "--a-start", f"{sys.executable} {script} {target.port}", "--b", target.url]
    comparison = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtest.compare", *arguments, "-c", "1", "--rounds", "100000"),
        *("--log-dir", str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert comparison.stdout is not None
    assert (await comparison.stdout.readline()).startswith(b"round 1")
    comparison.terminate()
    await comparison.communicate()
    assert comparison.returncode == 130
    with pytest.raises(ServerUnusable, match="does not answer"):
        await first_model(target)


async def test_a_program_that_ends_says_why(target: Target, tmp_path: Path) -> None:
    command = f"""{sys.executable} -c 'import sys; sys.exit("no such model")'"""
    with pytest.raises(ServerUnusable, match=r"status 1 before it answered:\nno such model"):
        async with started(command, target, ONE, log=tmp_path / "log", timeout_s=30):
            pass


@pytest.mark.parametrize("command", ["./no-such-program", "'half a quote"])
async def test_a_command_that_is_none(command: str, target: Target, tmp_path: Path) -> None:
    with pytest.raises(ServerUnusable, match="cannot be started"):
        async with started(command, target, ONE, log=tmp_path / "log", timeout_s=30):
            pass


async def test_one_that_never_answers_is_given_up_and_stopped(target: Target, tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'import time; time.sleep(600)'"
    with pytest.raises(ServerUnusable, match="no answer at"):
        async with started(command, target, ONE, log=tmp_path / "log", timeout_s=0.1):
            pass


async def test_a_server_that_is_there_already_is_not_mistaken_for_it(tmp_path: Path) -> None:
    async def answer(request: Received) -> AsyncGenerator[bytes, None]:
        yield plain("200 OK", '{"data": [{"id": "other"}]}')

    async with serve(answer) as other:
        with pytest.raises(ServerUnusable, match="stop what is there"):
            async with started("true", other.target, ONE, log=tmp_path / "log", timeout_s=30):
                pass
