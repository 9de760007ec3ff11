"""Builds the C kernels from the sources that are there, and runs each test with every instruction set of this host."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu.library import VARIANTS, variants

ROOT = Path(__file__).parents[5]


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        pytest.skip("the C kernels are for Linux on x86-64")
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in variants():
        pytest.skip(f"this processor has no {name}")
    return name


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
