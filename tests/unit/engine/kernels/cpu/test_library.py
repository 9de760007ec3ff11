import pytest
import torch

from engine.kernels.cpu import library
from engine.kernels.cpu.library import KernelsMissing, kernel_table, openmp_runtimes, variants


def test_openmp_is_torchs() -> None:
    library.library()
    runtimes = openmp_runtimes()
    assert len(runtimes) == 1
    assert "torch" in runtimes[0]


def test_the_first_variant_is_the_default() -> None:
    assert kernel_table(torch.float32).variant == variants()[0]


def test_variants_have_kernels_of_their_own() -> None:
    tables = [kernel_table(dtype, name) for name in variants() for dtype in (torch.float32, torch.bfloat16)]
    assert len({table.linear for table in tables}) == len(tables)


def test_unknown_variant() -> None:
    with pytest.raises(KernelsMissing, match="no sse1"):
        kernel_table(torch.float32, "sse1")


def test_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: iter(()))
    with pytest.raises(KernelsMissing, match="compiler"):
        library.library.__wrapped__()
