"""The C kernels for tests: built from the sources that are there."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "engine/kernels/cpu/csrc"
_EMULATED = ROOT / "tests/unit/engine/kernels/cpu/avx512_emulated.h"
AVX512_EMULATED = ["-mavx2", "-mfma", "-mf16c", "-include", str(_EMULATED)]
"""Flags of the compiler for sources of `copy_without_avx512`."""


def copy_without_avx512(sources: Path, target: Path) -> Path:
    """The C files, those for AVX-512 without the line that asks the compiler for such instructions."""
    shutil.copytree(sources, target)
    for path in target.glob("*.c"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(
            "".join(line for line in lines if not (line.startswith("#pragma GCC target") and "512" in line))
        )
    return target


@cache
def build_kernels() -> None:
    """Bring the library up to date, once. Skips the test where there can be none."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        pytest.skip("the C kernels are for Linux on x86-64")
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)
