"""Tokens from logits, in C."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels import Choices
from engine.kernels.cpu.library import Sample, kernel_table
from engine.kernels.cpu.run import run

_BYTES_PER_TOKEN = 32  # see struct cl_sample


def choose_tokens(logits: Tensor, choices: Choices, variant: str | None = None) -> tuple[Tensor, Tensor]:
    """See `engine.kernels.Kernels`."""
    vocab_size = logits.shape[-1]
    assert logits.dtype == torch.float32
    assert logits.stride(-1) == 1
    tokens = torch.empty(len(choices.rows), dtype=torch.int64)
    usable = torch.empty(len(choices.rows), dtype=torch.bool)
    workspace = torch.empty(torch.get_num_threads(), -(-vocab_size // 64) * 64 * _BYTES_PER_TOKEN, dtype=torch.uint8)
    ticket = ctypes.c_int64(0)
    columns = {name: getattr(choices, name).ctypes.data for name in ("temperature", "top_k", "top_p", "min_p", "u")}
    run(
        kernel_table(torch.float32, variant).sample,
        Sample(
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            size=vocab_size,
            rows=choices.rows.ctypes.data,
            num_rows=len(choices.rows),
            **columns,
            tokens=tokens.data_ptr(),
            usable=usable.data_ptr(),
            workspace=workspace.data_ptr(),
            ticket=ctypes.addressof(ticket),
        ),
        max_threads=len(choices.rows),
    )
    return tokens, usable
