"""Running kernels: one at a time, for callers that do other things in between."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels.cpu.library import Call, library

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
"""enum cl_activation"""


def run(kernel: int, args: ctypes.Structure) -> None:
    """Run one kernel to its end, with torch's number of threads.

    What `args` points to must stay alive meanwhile; that is the caller's business.
    """
    call = Call(kernel, ctypes.addressof(args))
    library().cl_run(ctypes.addressof(call), 1, torch.get_num_threads())


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
