"""Models from the hub: the real client against a small hub made here, in a process of its own (it reads the
environment when it is imported)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
COMMIT = "c" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"x" * 300_000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"code",
    "onnx/model.safetensors": b"for another tool",
}

# Prints what came of it as JSON: the path, or the error; and the progress that was told.
RESOLVE = """
import json, sys
from engine.errors import ModelError
from engine.model.resolve import resolve_model
told = []
revision = sys.argv[2] if len(sys.argv) > 2 else None
try:
    result = {"path": str(resolve_model(sys.argv[1], revision=revision, progress=lambda *step: told.append(step)))}
except ModelError as error:
    result = {"error": str(error), "hint": error.hint, "setting": error.setting}
print(json.dumps({**result, "told": told}))
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download needs. It has `owner/tiny`, and `owner/gated` behind a gate."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/models/owner/tiny/revision/main":
            self.send({"id": "owner/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]})
        elif path == f"/api/models/owner/tiny/tree/{COMMIT}":
            self.send(
                [{"type": "file", "path": name, "size": len(data), "oid": _oid(data)} for name, data in FILES.items()]
            )
        elif path.startswith("/api/models/owner/tiny/revision/"):
            self.send({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/owner/gated"):
            self.send({"error": "Access to this model is restricted"}, 403, {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/owner/broken"):
            self.send({"error": "The hub has a cold"}, 400)
        elif (name := path.removeprefix(f"/owner/tiny/resolve/{COMMIT}/")) in FILES:
            self.send(FILES[name], headers={"ETag": f'"{_oid(FILES[name])}"', "X-Repo-Commit": COMMIT})
        else:
            self.send({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def send(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def resolve(endpoint: str, home: Path, *arguments: str, **environ: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", RESOLVE, *arguments],
        cwd=ROOT,
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    outcome: dict[str, Any] = json.loads(result.stdout)
    return outcome


def test_weights_and_tokenizer_come_down_code_and_pickles_do_not(hub: str, tmp_path: Path) -> None:
    outcome = resolve(hub, tmp_path, "owner/tiny")
    path = Path(outcome["path"])
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    stage, *shares = outcome["told"]
    assert stage == ["downloading owner/tiny"]
    assert shares[-1] == ["downloading owner/tiny", 1.0]

    offline = resolve("http://127.0.0.1:9", tmp_path, "owner/tiny")  # nothing listens there
    assert offline["path"] == outcome["path"]


@pytest.mark.parametrize(
    ("arguments", "error", "hint", "setting"),
    [
        (["owner/nothing"], "there is no model owner/nothing on the Hugging Face hub", "smollm2", "model"),
        (["smolm2"], "there is no model smolm2 on the Hugging Face hub", "did you mean smollm2?", "model"),
        (["owner/tiny", "v9"], "owner/tiny has no revision v9", "a branch, a tag or a commit", "revision"),
        (["owner/gated"], "owner/gated is gated", "hf auth login", "model"),
        (["not a name"], "there is no model not a name on the Hugging Face hub", "smollm2", "model"),
        (
            ["owner/broken"],
            "owner/broken is not on this machine, and the Hugging Face hub did not give it: ",
            "smollm2",
            "model",
        ),
    ],
)
def test_what_is_not_to_be_had(
    hub: str, tmp_path: Path, arguments: list[str], error: str, hint: str, setting: str
) -> None:
    outcome = resolve(hub, tmp_path, *arguments)
    assert outcome["error"].startswith(error)
    assert "\n" not in outcome["error"]
    assert hint in outcome["hint"]
    assert outcome["setting"] == setting


def test_no_network_and_not_here(tmp_path: Path) -> None:
    outcome = resolve("http://127.0.0.1:9", tmp_path, "owner/tiny")
    assert outcome["error"].startswith("owner/tiny is not on this machine, and the Hugging Face hub did not give it: ")
    assert "refused" in outcome["error"]
