"""Builds the C kernels from the sources that are there, and runs each test with every instruction set of this host."""

from collections.abc import Iterator

import pytest
import torch

from engine.kernels.cpu.library import VARIANTS, cache_dtypes, variants
from tests.cpu_kernels import build_kernels

TYPES = [(dtype, cached) for dtype in (torch.float32, torch.bfloat16) for cached in cache_dtypes(dtype)]
NARROW = [both for both in TYPES if both[0] != both[1]]


def _names(types: tuple[torch.dtype, torch.dtype]) -> str:
    return " in ".join(str(each).removeprefix("torch.") for each in types)


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


@pytest.fixture(params=TYPES, ids=_names)
def types(request: pytest.FixtureRequest) -> tuple[torch.dtype, torch.dtype]:
    """Of queries, keys and values; and of the cache."""
    both: tuple[torch.dtype, torch.dtype] = request.param
    return both


@pytest.fixture(params=NARROW, ids=_names)
def narrow_types(request: pytest.FixtureRequest) -> tuple[torch.dtype, torch.dtype]:
    """Those of `types` where the cache is of another type."""
    both: tuple[torch.dtype, torch.dtype] = request.param
    return both


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
