"""Normalisation and activation, in C."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels.cpu.library import ActAndMul, RMSNorm, kernel_table
from engine.kernels.cpu.run import ACTIVATIONS, address, as_rows, run, threads_for


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None, *, variant: str | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of x and residual [..., N] normalised, and the sum itself (x where there is no residual).

    `weight` is float32 [N]; models that multiply by 1 + weight have that added beforehand.
    """
    rows = as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype)
    before = None if residual is None else as_rows(residual)
    num_rows, size = ctypes.c_int64(rows.shape[0]), x.shape[-1]
    args = RMSNorm(
        num_rows=ctypes.addressof(num_rows),
        x=rows.data_ptr(),
        x_stride=rows.stride(0),
        residual=address(before),
        residual_stride=0 if before is None else before.stride(0),
        sum=None if before is None else total.data_ptr(),
        sum_stride=size,
        out=out.data_ptr(),
        out_stride=size,
        weight=address(weight),
        size=size,
        eps=eps,
    )
    run(kernel_table(x.dtype, variant).rms_norm, args, max_threads=threads_for(out.nbytes))
    return out, total


def act_and_mul(x: Tensor, activation: str, *, variant: str | None = None) -> Tensor:
    """act(first half) * second half of x [..., 2 N], as [..., N]. `activation` is a key of ACTIVATIONS."""
    rows, size = as_rows(x), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype)
    num_rows = ctypes.c_int64(rows.shape[0])
    args = ActAndMul(
        num_rows=ctypes.addressof(num_rows),
        x=rows.data_ptr(),
        x_stride=rows.stride(0),
        out=out.data_ptr(),
        out_stride=size,
        size=size,
        activation=ACTIVATIONS[activation],
    )
    run(kernel_table(x.dtype, variant).act_and_mul, args, max_threads=threads_for(out.nbytes))
    return out
