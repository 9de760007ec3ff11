"""The CPU back end of the kernel contract."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from engine.kernels import AttentionOptions, ChooseTokens, PackedRows
from engine.kernels.cpu import attention, sampling
from engine.kernels.cpu.library import KernelsMissing, cache_dtypes, is_supported, kernel_table


class CpuKernels:
    """See `engine.kernels.Kernels`. Results do not depend on the batch, bit for bit."""

    def __init__(self, dtype: torch.dtype, block_size: int, variant: str | None = None) -> None:
        """Raises KernelsMissing when these kernels cannot be used here, or with this type or block size."""
        if not is_supported(dtype):
            raise KernelsMissing(f"the C kernels compute in float32 and bfloat16, not in {dtype}".replace("torch.", ""))
        if block_size % attention.BLOCK_MULTIPLE:
            raise KernelsMissing(f"the C kernels need a block_size that is a multiple of {attention.BLOCK_MULTIPLE}")
        self._dtype = dtype
        self._variant = kernel_table(dtype, variant).variant
        self.choose_tokens: ChooseTokens = sampling.TokenChooser(variant)
        """See `Kernels`."""
        self.NAME = f"cpu ({self._variant})"

    def plan_attention(self, rows: PackedRows, windows: Collection[int | None], device: torch.device) -> attention.Plan:
        """See `Kernels`."""
        return attention.plan_attention(rows)

    def cache_dtypes(self, dtype: torch.dtype) -> Collection[torch.dtype]:
        """See `Kernels`."""
        return cache_dtypes(dtype)

    def empty_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        assert device.type == "cpu", device
        return attention.empty_cache(num_blocks, block_size, num_kv_heads, dims, self._dtype, dtype)

    def write_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """See `Kernels`."""
        attention.write_kv(key, value, k_cache, v_cache, slots, self._variant)

    def paged_attention(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: attention.Plan, options: AttentionOptions
    ) -> Tensor:
        """See `Kernels`."""
        return attention.paged_attention(query, k_cache, v_cache, plan, options, self._variant)
