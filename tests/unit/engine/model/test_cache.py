"""The cache of unpacked models: complete or not there, whatever happens to the processes that fill it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.model.cache import ModelCache

ROOT = Path(__file__).parents[4]

# Fills the model "m" half, says so, waits for a line (or its death), then fills the rest.
HALF_WAY = """
import sys
from pathlib import Path
from engine.model.cache import ModelCache

def make(target, scratch):
    (target / "first").write_text("half")
    (scratch / "download").write_text("x")
    print("half way", flush=True)
    sys.stdin.readline()
    (target / "second").write_text("whole")

print(ModelCache(sys.argv[1]).get("m", make), flush=True)
"""


def start_half_way(cache: Path) -> subprocess.Popen[str]:
    """A process that holds the lock, half way through making the model "m"."""
    process = subprocess.Popen(
        [sys.executable, "-c", HALF_WAY, str(cache)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half way\n"
    return process


def close(process: subprocess.Popen[str]) -> None:
    process.communicate()
    assert process.stdin is not None


def make_whole(target: Path, scratch: Path) -> None:
    assert list(target.iterdir()) == []
    assert list(scratch.iterdir()) == []
    (target / "first").write_text("mine")


def must_not_make(target: Path, scratch: Path) -> None:
    raise AssertionError("it is there already")


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_made_once(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    path = cache.get("m", make_whole)
    assert path == cache.path("m") == tmp_path / "models" / "m"
    assert files(path) == {"first"}
    assert cache.get("m", must_not_make) == path
    assert files(tmp_path / "models") == {"m", ".m.lock"}


def test_a_failure_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(target: Path, scratch: Path) -> None:
        (target / "first").write_text("half")
        raise ModelError("no network")

    with pytest.raises(ModelError, match="no network"):
        ModelCache(tmp_path).get("m", fail)
    assert files(tmp_path / "models") == {".m.lock"}
    assert files(ModelCache(tmp_path).get("m", make_whole)) == {"first"}


def test_killed_half_way_and_run_again(tmp_path: Path) -> None:
    process = start_half_way(tmp_path)
    process.kill()
    close(process)
    assert not ModelCache(tmp_path).path("m").exists()
    assert files(tmp_path / "models") == {".m.lock", ".m.partial"}  # what it left behind
    path = ModelCache(tmp_path).get("m", make_whole)  # asserts that it starts from nothing
    assert (path / "first").read_text() == "mine"
    assert files(tmp_path / "models") == {"m", ".m.lock"}


def test_a_second_process_waits_for_the_first(tmp_path: Path) -> None:
    process = start_half_way(tmp_path)
    waiting = threading.Event()
    found: list[Path] = []

    def wait_for_it() -> None:
        cache = ModelCache(tmp_path, lambda stage, done=None: waiting.set())
        found.append(cache.get("m", must_not_make))

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    assert waiting.wait(timeout=30)  # it has said that it waits
    assert not found
    output, _ = process.communicate("go on\n", timeout=30)
    thread.join(timeout=30)
    assert found == [Path(output.strip())]
    assert files(found[0]) == {"first", "second"}


def test_two_models_do_not_wait_for_each_other(tmp_path: Path) -> None:
    process = start_half_way(tmp_path)
    try:
        assert files(ModelCache(tmp_path).get("other", make_whole)) == {"first"}
    finally:
        process.kill()
        close(process)


def test_files_are_as_readable_as_their_directory(tmp_path: Path) -> None:
    def make(target: Path, scratch: Path) -> None:
        (target / "model.safetensors").write_text("x")
        (target / "model.safetensors").chmod(0o600)

    old = os.umask(0o027)
    try:
        path = ModelCache(tmp_path).get("m", make)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert stat.S_IMODE((path / "model.safetensors").stat().st_mode) == 0o640


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the directory should be")
    with pytest.raises(ModelError, match=r"cannot write .*models: (File exists|Not a directory)") as caught:
        ModelCache(tmp_path).get("m", make_whole)
    assert caught.value.setting == "cache_dir"
    assert caught.value.hint is not None
    assert "--cache-dir" in caught.value.hint


def test_a_full_disk(tmp_path: Path) -> None:
    def fill(target: Path, scratch: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match="No space left on device"):
        ModelCache(tmp_path).get("m", fill)


def test_the_default_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ModelCache().path("m") == tmp_path / ".cache" / "chairlift" / "models" / "m"
