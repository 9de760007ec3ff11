from pathlib import Path

import pytest
import torch

from engine.kernels.cpu import library
from engine.kernels.cpu.library import KernelsMissing, kernel_table, openmp_path, variants


def test_openmp_is_torchs() -> None:
    """By file: other packages may bring runtimes of their own, which is their business."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/torch/" in line}
    assert openmp_path() in mapped


def test_the_first_variant_is_the_default() -> None:
    assert kernel_table(torch.float32).variant == variants()[0]


def test_variants_have_kernels_of_their_own() -> None:
    tables = [kernel_table(dtype, name) for name in variants() for dtype in (torch.float32, torch.bfloat16)]
    assert len({table.linear for table in tables}) == len(tables)


def test_unknown_variant() -> None:
    with pytest.raises(KernelsMissing, match="no sse1"):
        kernel_table(torch.float32, "sse1")


def test_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "DIRECTORY", tmp_path)
    with pytest.raises(KernelsMissing, match="compiler"):
        library.library.__wrapped__()


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    with pytest.raises(library.KernelsMissing, match="another version"):
        library.library.__wrapped__()
