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


@cache
def build_kernels() -> None:
    """Bring the library up to date, once. Skips the test where there can be none."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        pytest.skip("the C kernels are for Linux on x86-64")
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)
