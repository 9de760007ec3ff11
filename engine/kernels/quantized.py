"""int8 for what the cache keeps of a token: numbers in [-127, 127], and a scale for each head of each token.

A token's scale is worked out from that token alone, when it is stored, so what is stored never depends on what else is
in the step. The C kernels do the same (`quantize` in `cpu/csrc/write_kv.inc.h`).
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
"""Of a scale: float32."""
LEAST = 1e-30
"""A head of smaller numbers is treated as if it had one of this size: the inverse of its scale must be finite."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., dim] and float32 scales [..., 1] of x [..., dim]: x = int8 * scale, but for rounding.

    The largest number of a head becomes 127 or -127. Where a number is not finite the scale is NaN, so that it is
    noticed as it would be without int8.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    is_finite = torch.isfinite(largest)  # NaN is the largest, if there is one
    largest = largest.clamp(min=LEAST)
    inverse = torch.full_like(largest, 127) / largest  # 127 / largest would be 127 * (1 / largest), rounded twice
    small = torch.where(is_finite, wide * inverse, 0).round().to(torch.int8)
    return small, torch.where(is_finite, largest / 127, torch.nan)


def dequantize(small: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in `dtype`."""
    return (small * scale).to(dtype)
