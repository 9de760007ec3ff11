"""README's examples run as they are written, but for the port."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.process import Daemon

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"


def examples(language: str, holding: str) -> list[str]:
    """The code blocks of README.md in a language that hold some text."""
    blocks = re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    return [block for block in blocks if holding in block]


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl(daemon: Daemon):
    chat, stream = [run("bash", "-c", block.replace(ADDRESS, daemon.url)) for block in examples("sh", "curl ")]
    answer = json.loads(chat)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] <= 60
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_openai_sdk(daemon: Daemon):
    (block,) = examples("python", "from openai")
    assert run(sys.executable, "-c", block.replace(ADDRESS, daemon.url)).strip()


def test_offline():
    (block,) = examples("python", "from engine")
    assert len(run(sys.executable, "-c", block).strip().splitlines()) >= 2
