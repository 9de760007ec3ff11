"""Running kernels: one at a time, for callers that do other things in between."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels.cpu.library import Call, library

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
"""enum cl_activation"""


BYTES_PER_THREAD = 64 << 10
"""Waking a thread takes about as long as passing over so much."""


def run(kernel: int, args: ctypes.Structure, *, max_threads: int | None = None) -> None:
    """Run one kernel to its end, with torch's number of threads or fewer.

    What `args` points to must stay alive meanwhile; that is the caller's business.
    """
    threads = torch.get_num_threads() if max_threads is None else min(max_threads, torch.get_num_threads())
    call = Call(kernel, ctypes.addressof(args))
    library().cl_run(ctypes.addressof(call), 1, threads)


def threads_for(num_bytes: int) -> int:
    """How many threads are worth waking to pass over so much."""
    return max(1, -(-num_bytes // BYTES_PER_THREAD))


def elements_per_pack(dtype: torch.dtype) -> int:
    """Elements that stand side by side in the packed layouts: PK in `csrc/kernels.h`."""
    return 2 if dtype == torch.bfloat16 else 1


def as_rows(x: Tensor) -> Tensor:
    """[..., N] as [rows, N] with the numbers of a row side by side. A view wherever that is possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers start; None for none."""
    return None if tensor is None else tensor.data_ptr()
