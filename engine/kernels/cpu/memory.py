"""Memory for weights, in large pages where the system has them.

A step reads all weights. In pages of 4 KiB it would miss the processor's address cache at every one of them, and the
processor's own fetching ahead stops at the end of a page.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
"""A large page."""
SLAB_BYTES = 32 << 20
"""Tensors smaller than this share slabs: alone, most would not fill a large page."""
ALIGNMENT = 64
"""A cache line."""


class Slabs:
    """Hands out memory from slabs, each of which is freed with the last of its tensors."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._left = torch.empty(0, dtype=torch.uint8)
        """What is left of the newest slab."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros on the CPU, at the begin of a cache line."""
        num_bytes = numel * dtype.itemsize
        with self._lock:
            if self._left.numel() < num_bytes:
                self._left = _map(max(SLAB_BYTES, num_bytes))
            taken, self._left = self._left[:num_bytes], self._left[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return taken.view(dtype)


zeros = Slabs().zeros


def _map(num_bytes: int) -> Tensor:
    """[num_bytes] of zeros in pages of their own, which take memory only once they are written to."""
    pages = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # before anything is written: a page's size is chosen then
    slab = torch.frombuffer(pages, dtype=torch.uint8)
    offset = -slab.data_ptr() % PAGE_BYTES
    return slab[offset : offset + num_bytes]
