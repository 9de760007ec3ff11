"""Linear layers with packed weights, in C. struct cl_linear in `csrc/kernels.h` draws how weights lie.

Several matrices of the same input can be packed into one (query, key and value projections), and a gate and an up
projection interleaved, so that their product comes out in one go.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu import memory
from engine.kernels.cpu.library import Gather, Linear, Pack, is_supported, kernel_table, library
from engine.kernels.cpu.run import ACTIVATIONS, address, as_rows, elements_per_pack, run, threads_for

STRIP = 16
"""Outputs that stand together."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """y = x W^T + b, or act(x G^T) * (x U^T). Holds the only copy of the weights that it needs."""

    weight: Tensor
    """Flat, packed; int8 when there is a scale."""
    scale: Tensor | None
    """float32, one number for each packed output: weight = int8 * scale."""
    bias: Tensor | None
    """float32, for each packed output."""
    in_features: int
    out_features: int
    """Columns of the result."""
    dtype: torch.dtype
    """Of inputs and outputs."""
    activation: str
    """A key of ACTIVATIONS; other than `none`: gate and up are interleaved."""
    variant: str | None = None
    """Instruction set; None: the fastest."""

    def arguments(self, *, alpha: float = 1.0, float_output: bool = False) -> Linear:
        """The arguments of the C kernel, but for input, residual, output and number of rows."""
        return Linear(
            weight=self.weight.data_ptr(),
            scale=address(self.scale),
            bias=address(self.bias),
            in_features=self.in_features,
            out_features=self.out_features,
            alpha=alpha,
            activation=ACTIVATIONS[self.activation],
            out_float=float_output,
        )

    @property
    def kernel(self) -> int:
        """The address of the C kernel."""
        return kernel_table(self.dtype, self.variant).linear

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, *, alpha: float = 1.0, float_output: bool = False
    ) -> Tensor:
        """residual + alpha * layer(x), for x [..., in_features]; returns [..., out_features]."""
        rows = as_rows(x)
        before = None if residual is None else as_rows(residual)
        out = torch.empty(
            *x.shape[:-1], self.out_features, dtype=torch.float32 if float_output else self.dtype, device=x.device
        )
        num_rows = ctypes.c_int64(rows.shape[0])
        args = self.arguments(alpha=alpha, float_output=float_output)
        args.num_rows = ctypes.addressof(num_rows)
        args.x, args.x_stride = rows.data_ptr(), rows.stride(0)
        args.out, args.out_stride = out.data_ptr(), self.out_features
        if before is not None:
            args.residual, args.residual_stride = before.data_ptr(), before.stride(0)
        run(self.kernel, args)
        return out


def gather_rows(layer: PackedLinear, ids: Tensor) -> Tensor:
    """weight[ids] of a layer without int8 and gate: [..., in_features] for int64 ids [...]."""
    ids = ids.contiguous()
    out = torch.empty(*ids.shape, layer.in_features, dtype=layer.dtype)
    num_rows = ctypes.c_int64(ids.numel())
    args = gather_arguments(layer, out)
    args.num_rows, args.ids = ctypes.addressof(num_rows), ids.data_ptr()
    run(kernel_table(layer.dtype, layer.variant).gather, args, max_threads=threads_for(out.nbytes))
    return out


def gather_arguments(embedding: PackedLinear | Tensor, out: Tensor) -> Gather:
    """The arguments of the C kernel, but for number of rows and ids. Of a layer, or of a table [N, in_features]."""
    if isinstance(embedding, Tensor):
        assert embedding.is_contiguous()
        weight, num_strips = embedding, 0
    else:
        assert embedding.scale is None, "int8"
        assert embedding.activation == "none", embedding.activation
        weight, num_strips = embedding.weight, -(-embedding.out_features // STRIP)
    assert weight.dtype == out.dtype
    return Gather(weight=weight.data_ptr(), out=out.data_ptr(), in_features=out.shape[-1], total_strips=num_strips)


def can_pack(weight: Tensor) -> bool:
    """Whether a layer with this weight [N, K] can be computed by the C kernels."""
    return is_supported(weight.dtype) and weight.shape[1] % elements_per_pack(weight.dtype) == 0


def pack_linear(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    int8: bool = False,
    variant: str | None = None,
) -> PackedLinear:
    """One layer of weights [N_i, K] (and biases [N_i] or None) with the same input; its outputs one after the other."""
    return _pack(weights, biases, gated_by=None, int8=int8, variant=variant)


def pack_gated(
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    activation: str,
    *,
    int8: bool = False,
    variant: str | None = None,
) -> PackedLinear:
    """act(gate(x)) * up(x) as one layer, of gate's and up's weight [N, K] and bias."""
    return _pack(weights, biases, gated_by=activation, int8=int8, variant=variant)


def _pack(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    gated_by: str | None,
    int8: bool,
    variant: str | None,
) -> PackedLinear:
    assert all(can_pack(weight) and weight.device.type == "cpu" for weight in weights)
    dtype, in_features = weights[0].dtype, weights[0].shape[1]
    sizes = [weight.shape[0] for weight in weights]
    pk, spread = elements_per_pack(dtype), 1 if gated_by is None else 2
    strips = -(-(sum(sizes) // spread) // STRIP) * spread
    block = STRIP * 16 * pk
    packed = memory.zeros(strips * -(-in_features // (16 * pk)) * block, torch.int8 if int8 else dtype)
    scale = torch.ones(strips * STRIP) if int8 else None
    bias = torch.zeros(strips * STRIP) if any(part is not None for part in biases) else None
    first = offset = 0
    for weight, part in zip(weights, biases, strict=True):
        rows = torch.arange(first, first + weight.shape[0])
        outputs = (rows // STRIP * spread + offset) * STRIP + rows % STRIP  # their places in the packed matrix
        if bias is not None and part is not None:
            bias[outputs] = part.float()
        if scale is not None:
            source, scale[outputs] = _quantize(weight)
        else:
            source = weight.contiguous()
        args = Pack(
            source=source.data_ptr(),
            packed=packed.data_ptr(),
            rows=weight.shape[0],
            in_features=in_features,
            elem_bytes=packed.element_size(),
            pk=pk,
            first=first,
            spread=spread,
            offset=offset,
            total_strips=strips,
        )
        library().cl_pack_weight(ctypes.addressof(args), torch.get_num_threads())
        if gated_by is None:
            first += weight.shape[0]
        else:
            offset += 1
    out_features = sum(sizes) // spread
    return PackedLinear(packed, scale, bias, in_features, out_features, dtype, gated_by or "none", variant)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and float32 scale [N]: symmetric, the largest of each output at 127."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (wide / scale[:, None]).round().to(torch.int8), scale
