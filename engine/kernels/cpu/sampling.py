"""Tokens from logits, in C."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels import Choices
from engine.kernels.cpu.library import Sample, kernel_table
from engine.kernels.cpu.run import run

_BYTES_PER_TOKEN = 32  # see struct cl_sample


class TokenChooser:
    """`Kernels.choose_tokens`. Keeps its workspace, which grows with the largest call. One thread only."""

    def __init__(self, variant: str | None = None) -> None:
        self._kernel = kernel_table(torch.float32, variant).sample
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def __call__(self, logits: Tensor, choices: Choices) -> Tensor:
        """See `engine.kernels.ChooseTokens`."""
        num_rows, vocab_size = len(choices.rows), logits.shape[-1]
        assert logits.dtype == torch.float32
        assert logits.stride(-1) == 1
        num_threads = min(num_rows, torch.get_num_threads())
        num_bytes = num_threads * -(-vocab_size // 64) * 64 * _BYTES_PER_TOKEN
        if num_bytes > self._workspace.numel():
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8)
        tokens = torch.empty(num_rows, dtype=torch.int64)
        ticket = ctypes.c_int64(0)
        settings, step = choices.settings.buffer_info()[0], 8 * num_rows
        args = Sample(
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            size=vocab_size,
            rows=choices.rows.buffer_info()[0],
            num_rows=num_rows,
            temperature=settings,
            top_k=settings + step,
            top_p=settings + 2 * step,
            min_p=settings + 3 * step,
            seeds=choices.seeds.buffer_info()[0],
            positions=choices.positions.buffer_info()[0],
            tokens=tokens.data_ptr(),
            workspace=self._workspace.data_ptr(),
            ticket=ctypes.addressof(ticket),
        )
        run(self._kernel, args, max_threads=num_threads)
        return tokens
