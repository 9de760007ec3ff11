"""The server process: what it answers while it loads, how it ends, and with which status. The engine is a fake."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from server.daemon import BindError, bind

ROOT = Path(__file__).parents[3]

# `chairlift serve` with an engine that does what is said on stdin: "load" or "fail" to end its loading, then "die".
# The application has /hang, which answers when the engine has ended.
FAKE = """
import asyncio, ctypes, sys, threading, types
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
import engine.client
from engine.errors import ConfigError, EngineDead, EngineStopped
from server import cli, daemon, watchdog

class Engine:
    info = types.SimpleNamespace(name="fake", max_model_len=100, num_blocks=10, block_size=32, num_parameters=5e6,
                                 dtype="float32", device="cpu", kernels="reference", kv_cache_dtype="int8")
    tokenizer = types.SimpleNamespace(has_chat_template=False)
    dead = turn_began_s = None
    is_lost = False

    def __init__(self):
        self.ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self.listen, args=(loop,), daemon=True).start()

    def listen(self, loop):
        match sys.stdin.readline():
            case "die\\n":
                loop.call_soon_threadsafe(self.tell, EngineDead("test"))
            case "hang\\n":
                self.turn_began_s = 1.0
            case "hold the event loop\\n":
                loop.call_soon_threadsafe(self.wait_for_nothing)
            case "hold the interpreter\\n":
                self.hold_the_interpreter()

    def wait_for_nothing(self):
        threading.Event().wait()

    def hold_the_interpreter(self):
        ctypes.PyDLL(None).pause()  # PyDLL keeps the lock

    def give_up(self, error):
        self.dead = error
        self.ended.set()
        self.tell(error)

    def on_dead(self, callback):
        self.tell = callback

    async def close(self):
        self.ended.set()
        self.tell(EngineStopped("told to stop"))

    @classmethod
    async def start(cls, config, progress):
        progress("loading the model")
        if await asyncio.to_thread(sys.stdin.readline) == "fail\\n":
            raise ConfigError("there is no room\\nfor it", setting="kv_cache_tokens", hint="make some")
        return cls()

def create_app(settings, engine, watchdog, tracing):
    async def hello(request):
        return PlainTextResponse("hello")
    async def hang(request):
        print("hanging", file=sys.stderr, flush=True)
        await engine.ended.wait()
        return PlainTextResponse("the engine ended", 500)
    async def health(request):
        return PlainTextResponse(watchdog.problem or "well", 503 if watchdog.problem else 200)
    return Starlette(routes=[Route("/ready", hello), Route("/hang", hang), Route("/health", health)])

watchdog.LAST_RESORT_S = 1.0
engine.client.AsyncEngine = Engine
sys.modules["server.app"] = types.ModuleType("server.app")
sys.modules["server.app"].create_app = create_app
daemon._find_model = lambda config, progress: None
daemon._import_libraries = lambda: None
cli.main(["serve", "--port", "0", *sys.argv[1:]])
"""


class Process:
    """A server process, and what it says."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", FAKE, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        match = re.search(r"http://127\.0\.0\.1:\d+", self.read_until("it will answer at"))
        assert match
        self.client = httpx.Client(base_url=match[0], timeout=30, trust_env=False)

    def tell(self, word: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(word + "\n")
        self.popen.stdin.flush()

    def read_until(self, text: str) -> str:
        """The first line on stderr, of those not read yet, that has `text` in it."""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.said.append(line)
            if text in line:
                return line
        pytest.fail(f"never said {text!r}: {self.said}")

    def end(self) -> tuple[int, str]:
        """Exit status, and what was said since."""
        assert self.popen.stderr is not None
        rest = self.popen.stderr.read()  # its stdin stays open: an end of file there would tell it to go on
        return self.popen.wait(timeout=30), rest


@pytest.fixture
def start() -> Iterator[type[Process]]:
    started: list[Process] = []

    class Started(Process):
        def __init__(self, *arguments: str) -> None:
            super().__init__(*arguments)
            started.append(self)

    yield Started
    for process in started:
        process.popen.kill()
        process.popen.communicate()
        process.client.close()


def test_the_port_answers_while_the_model_loads_and_serves_when_it_is_there(start: type[Process]) -> None:
    process = start()
    process.read_until("loading the model")
    assert process.client.get("/live").status_code == 200
    for path in ("/ready", "/health", "/v1/models"):
        answer = process.client.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "loading"
        assert answer.headers["retry-after"] == "5"
    process.tell("load")
    process.read_until("Ready: fake at http://127.0.0.1:")
    ready = process.client.get("/ready")
    assert ready.text == "hello"
    assert ready.headers["x-content-type-options"] == "nosniff"
    assert ready.headers["x-frame-options"] == "DENY"
    process.popen.send_signal(signal.SIGTERM)
    status, said = process.end()
    assert status == 0
    assert "5.0 M parameters" in said
    assert "320 tokens in int8, 3.2 requests of full length" in said
    assert f"curl {process.client.base_url}".rstrip("/") + "/v1/completions" in said


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_it_at_once(start: type[Process], signum: signal.Signals) -> None:
    process = start()
    process.read_until("loading the model")
    assert process.client.get("/live").status_code == 200  # uvicorn is up: it handles the signals
    process.popen.send_signal(signum)
    assert process.end() == (0, "")


def test_a_model_that_cannot_be_served(start: type[Process]) -> None:
    process = start()
    process.read_until("loading the model")
    process.tell("fail")
    assert process.end() == (1, "chairlift: --kv-cache-tokens: there is no room for it (make some)\n")


def test_open_requests_may_finish_but_not_for_ever(start: type[Process]) -> None:
    process = start("--shutdown-timeout", "1")
    process.tell("load")
    process.read_until("Ready")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(process.client.get, "/hang")
        process.read_until("hanging")
        process.popen.send_signal(signal.SIGTERM)
        assert answer.result().text == "the engine ended"
    assert process.end()[0] == 0


def test_while_it_stops_new_requests_are_refused_and_a_second_signal_ends_it(start: type[Process]) -> None:
    process = start()
    process.tell("load")
    process.read_until("Ready")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(process.client.get, "/hang")
        process.read_until("hanging")
        process.popen.send_signal(signal.SIGTERM)
        while process.client.get("/ready").status_code == 200:
            pass
        for refused in (process.client.get("/ready"), process.client.post("/v1/completions", json={})):
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["code"] == "stopping"
        assert process.client.get("/health").text == "well"
        process.popen.send_signal(signal.SIGTERM)
        assert isinstance(answer.exception(), httpx.TransportError)
    assert process.end()[0] == 128 + signal.SIGTERM


def test_a_dead_engine_ends_the_process(start: type[Process]) -> None:
    process = start()
    process.tell("load")
    process.read_until("Ready")
    process.tell("die")
    assert process.end()[0] == 1


def test_a_hung_engine_is_told_then_its_requests_fail_and_the_process_ends(start: type[Process]) -> None:
    process = start("--stall-timeout", "1", "--stall-grace", "1")
    process.tell("load")
    process.read_until("Ready")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(process.client.get, "/hang")
        process.read_until("hanging")
        assert process.client.get("/health").text == "well"
        process.tell("hang")
        process.read_until("the engine hangs")
        process.read_until("Thread 0x")
        health = process.client.get("/health")
        assert health.status_code == 503
        assert "its step has not ended" in health.text
        assert answer.result().text == "the engine ended"
    status, said = process.end()
    assert status == 1
    assert "the process ends" in said


@pytest.mark.parametrize(
    ("what", "sign"), [("hold the event loop", "the event loop hangs"), ("hold the interpreter", "Timeout (")]
)
def test_what_holds_the_event_loop_or_the_interpreter_ends_the_process_with_stacks(
    start: type[Process], what: str, sign: str
) -> None:
    process = start("--stall-timeout", "1", "--stall-grace", "0")
    process.tell("load")
    process.read_until("Ready")
    process.tell(what)
    process.read_until(sign)
    status, said = process.end()
    assert status == 1
    assert what.replace("hold the event loop", "wait for nothing").replace(" ", "_") in said


def test_a_port_in_use_is_told_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "server", "serve", "--port", str(port)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"chairlift: port {port} on 127.0.0.1 is in use (another program listens there: stop it, or choose another "
        "with --port)\n"
    )


def test_bind() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert port > 0
        with pytest.raises(BindError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
    with pytest.raises(BindError, match="there is no address"):
        bind("no such host", 0)
    with pytest.raises(BindError, match=r"cannot listen on 192.0.2.1 port 0"):
        bind("192.0.2.1", 0)  # an address of documentation: nobody has it
