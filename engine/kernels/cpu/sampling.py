"""Tokens from logits, in C."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels import Choices
from engine.kernels.cpu.library import Sample, kernel_table
from engine.kernels.cpu.run import run

_BYTES_PER_TOKEN = 32  # see struct cl_sample


def choose_tokens(logits: Tensor, choices: Choices, variant: str | None = None) -> Tensor:
    """See `engine.kernels.Kernels`."""
    vocab_size = logits.shape[-1]
    assert logits.dtype == torch.float32
    assert logits.stride(-1) == 1
    num_rows, numbers = len(choices.rows), choices.numbers
    assert numbers.flags.c_contiguous
    tokens = torch.empty(num_rows, dtype=torch.int64)
    workspace = torch.empty(torch.get_num_threads(), -(-vocab_size // 64) * 64 * _BYTES_PER_TOKEN, dtype=torch.uint8)
    ticket = ctypes.c_int64(0)
    first, step = numbers.ctypes.data, numbers.strides[0]
    run(
        kernel_table(torch.float32, variant).sample,
        Sample(
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            size=vocab_size,
            rows=choices.rows.ctypes.data,
            num_rows=num_rows,
            temperature=first,
            top_k=first + step,
            top_p=first + 2 * step,
            min_p=first + 3 * step,
            u=first + 4 * step,
            tokens=tokens.data_ptr(),
            workspace=workspace.data_ptr(),
            ticket=ctypes.addressof(ticket),
        ),
        max_threads=num_rows,
    )
    return tokens
