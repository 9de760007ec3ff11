import ctypes
import time
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu import library
from engine.kernels.cpu.library import Call, KernelsMissing, kernel_table, openmp_path, variants


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


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_calls_are_done_in_order_and_each_of_their_parts_once(num_threads: int) -> None:
    """Also with more threads than cores, where some come late."""
    done: list[tuple[int, int]] = []
    sizes = set()

    def kernel(number: int, part: int, num_parts: int) -> None:
        time.sleep(0)
        done.append((number or 0, part))
        sizes.add(num_parts)

    as_c = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)(kernel)
    where = ctypes.cast(as_c, ctypes.c_void_p).value
    calls = (Call * 200)(*(Call(where, number) for number in range(200)))
    library.library().cl_run(ctypes.addressof(calls), len(calls), num_threads)
    assert sizes == {num_threads}
    assert [number for number, _ in done] == sorted(number for number, _ in done)
    assert sorted(done) == [(number, part) for number in range(200) for part in range(num_threads)]
