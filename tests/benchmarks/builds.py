"""Another build of the kernels in place of this one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.kernels.cpu import library as library_module
from engine.kernels.cpu.library import kernel_table, library

OWN = library_module.DIRECTORY


@contextmanager
def build_at(directory: Path) -> Iterator[None]:
    """Use the `_kernels*.so` in a folder, whatever version of the structs it was built for: that is the caller's care.

    Kernels that are looked up within may be called afterwards, too.
    """
    [file] = directory.glob("_kernels*.so")
    kept = library_module.DIRECTORY, library_module.ABI
    library_module.DIRECTORY, library_module.ABI = directory, ctypes.CDLL(str(file)).cl_abi()
    _forget()
    try:
        yield
    finally:
        library_module.DIRECTORY, library_module.ABI = kept
        _forget()


def _forget() -> None:
    for cached in (library, kernel_table):
        cached.cache_clear()
