"""Builds the C kernels from the sources that are there, and runs each test with every instruction set of this host."""

from collections.abc import Iterator

import pytest
import torch

from engine.kernels.cpu.library import VARIANTS, variants
from tests.cpu_kernels import build_kernels


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    build_kernels()


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
