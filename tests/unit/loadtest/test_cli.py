"""`python -m loadtest` and `python -m loadtest.compare` from the command line to the exit status."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest import cli, compare
from tests.unit.loadtest.sse_server import (
    END_OF_BODY,
    STREAM_HEAD,
    Answer,
    Received,
    SSEServer,
    chunked,
    complete,
    event,
    plain,
    serve,
    text_chunk,
    usage_chunk,
)

SMALL = ["--input-len", "3", "--output-len", "4", "--spread", "0"]


async def good(request: Received) -> AsyncGenerator[bytes, None]:
    """A server that lists a model, has a version, and completes."""
    pages = {"/v1/models": '{"data": [{"id": "m"}]}', "/version": '{"version": "1.2"}'}
    if request.path in pages:
        yield plain("200 OK", pages[request.path])
        return
    async for piece in complete(request):
        yield piece


async def busy(request: Received) -> AsyncGenerator[bytes, None]:
    """A server that lists a model and completes nothing."""
    if request.method == "GET":
        async for piece in good(request):
            yield piece
    else:
        yield plain("503 Service Unavailable", "busy")


@contextmanager
def running(answer: Answer) -> Iterator[SSEServer]:
    """Serve from a thread of its own, since main() has an event loop of its own."""
    started: Future[tuple[SSEServer, Callable[[], None]]] = Future()

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with serve(answer) as server:
            started.set_result((server, lambda: loop.call_soon_threadsafe(stop.set)))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    server, stop = started.result(10)
    try:
        yield server
    finally:
        stop()
        thread.join()


def test_a_run_to_the_json_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    with running(good) as server:
        url = server.target.url
        arguments = ["--url", url, "-n", "5", "-c", "2", "--warmup", "3", "--seed", "7", "--json", str(file), *SMALL]
        assert cli.main(arguments) == 0
    posts = [request for request in server.received if request.method == "POST"]
    assert len(posts) == 8
    assert len({tuple(request.body["prompt"]) for request in posts}) == 8
    assert {request.body["model"] for request in posts} == {"m"}
    document = json.loads(file.read_text())
    assert document["server"] == {"url": url, "model": "m", "version": {"version": "1.2"}}
    assert document["pace"] == {"concurrency": 2}
    assert (document["load"]["seed"], document["load"]["num_requests"], document["warmup"]) == (7, 5, 3)
    results = document["results"]
    assert (results["num_completed"], results["num_output_tokens"], results["num_prompt_tokens"]) == (5, 20, 15)
    shown = capsys.readouterr().out
    assert "5 of 5" in shown
    assert "counted by usage" in shown


def test_failed_requests_make_the_status_one(capsys: pytest.CaptureFixture[str]) -> None:
    with running(busy) as server:
        assert cli.main(["--url", server.target.url, "-n", "3", *SMALL]) == cli.EXIT_FAILED_REQUESTS
    shown = capsys.readouterr().out
    assert "0 of 3" in shown
    assert "http 503" in shown


@pytest.mark.parametrize(("options", "said"), [([], True), (["--shared-prefix", "2"], False)])
def test_prompts_that_the_server_knows_are_told(
    options: list[str], said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(request: Received) -> AsyncGenerator[bytes, None]:
        if request.method == "GET":
            yield plain("404 Not Found", "{}")
        else:
            yield STREAM_HEAD + chunked(event(text_chunk("a", "length")))
            yield chunked(event(usage_chunk(3, 1, cached_tokens=2))) + END_OF_BODY

    with running(answer) as server:
        assert cli.main(["--url", server.target.url, "--model", "m", "-n", "1", *SMALL, *options]) == 0
    assert ("another --seed" in capsys.readouterr().out) is said


def test_open_loop_and_named_model(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with running(good) as server:
        arguments = ["--url", server.target.url, "-n", "4", "--rate", "500", "--model", "other", "--json", str(file)]
        assert cli.main([*arguments, *SMALL]) == 0
    assert "/v1/models" not in {request.path for request in server.received}
    document = json.loads(file.read_text())
    assert document["server"]["model"] == "other"
    assert document["pace"] == {"rate": 500.0, "seed": 0}


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with running(good) as server:
        url = server.target.url
    assert cli.main(["--url", url]) == cli.EXIT_UNUSABLE
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://10.0.0.1:8000"], "--allow-remote"),
        (["--url", "nonsense"], "not a URL"),
        (["-n", "0"], "not at least 1"),
        (["--spread", "1.5"], "not from 0 to 1"),
        (["--token-ids", "9:9"], "not LOW:HIGH"),
        (["--extra", "[]"], "not a JSON object"),
        (["--warmup", "-1"], "negative"),
        (["--rate", "0"], "not above 0"),
        (["--rate", "1", "-c", "1"], "not allowed with"),
    ],
)
def test_bad_options(arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_another_host_may_be_asked_for() -> None:
    parser = cli.make_parser()
    options = parser.parse_args(["--url", "http://10.0.0.1:8000", "--allow-remote"])
    assert cli.read_target(parser, options, options.url).host == "10.0.0.1"


def prompts(server: SSEServer) -> list[tuple[int, ...]]:
    return [tuple(request.body["prompt"]) for request in server.received if request.method == "POST"]


def test_compare_gives_both_sides_the_same_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    with running(good) as a, running(good) as b:
        arguments = ["--a", a.target.url, "--b", b.target.url, "--a-name", "ours", "--b-name", "theirs"]
        loads = ["-c", "1", "2", "--rounds", "3", "--at-least", "2", "--warmup", "1", "--json", str(file), *SMALL]
        assert compare.main([*arguments, *loads]) == 0
    assert sorted(prompts(a)) == sorted(prompts(b))
    assert len(set(prompts(a))) == len(prompts(a)) == 1 + 3 * (3 + 6)
    shown = capsys.readouterr().out
    assert "| c | tok/s, ours | theirs | times as good (range) |" in shown
    document: dict[str, Any] = json.loads(file.read_text())
    assert [cell["concurrency"] for cell in document["cells"]] == [1, 2]
    assert {len(cell[side]) for cell in document["cells"] for side in "ab"} == {3}
    assert document["servers"]["b"]["url"] == b.target.url


def test_compare_stops_at_a_server_that_answers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with running(good) as a, running(busy) as b:
        arguments = ["--a", a.target.url, "--b", b.target.url, "-c", "1", "--rounds", "1", *SMALL]
        assert compare.main(arguments) == cli.EXIT_UNUSABLE
    assert "no request to" in capsys.readouterr().err
