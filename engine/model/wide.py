"""Linear layers through float32 while a model is tried out, on processors without a product of bfloat16s.

There torch multiplies matrices of bfloat16 far more slowly than those of float32, and the forward passes of `probe` and
`fuse` would be most of a start. Sums are float32 and rounded once either way, so the trial says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.model.device import computes_bfloat16

MAX_WIDENED = 1 << 24
"""Weights that are float32 at a time: 64 MiB."""


def affordable_linears(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Within it this thread's `linear` of bfloat16 goes through float32, if that pays."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not computes_bfloat16(device):
        return _Widening()
    return nullcontext()


class _Widening(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (_linear if func is F.linear else func)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input [..., inputs], weight [outputs, inputs], bias [outputs] -> [..., outputs]."""
    if weight.dtype != torch.bfloat16:
        return F.linear(input, weight, bias)
    rows = max(1, MAX_WIDENED // weight.shape[1])
    wide = input.float()
    parts = [F.linear(wide, weight[first : first + rows].float()) for first in range(0, len(weight), rows)]
    out = torch.cat(parts, dim=-1)
    if bias is not None:
        out += bias
    return out.to(input.dtype)
