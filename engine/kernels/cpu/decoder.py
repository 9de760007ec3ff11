"""Whole decoder layers as one list of kernel calls, made once and run in every step by a single call into C; and what
comes before and after them, where a model is no more than that.

Between two steps only numbers that the calls point to change: how many tokens, where the step's angles and slots are.
Buffers are kept and grow with the largest step. One thread only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from engine.kernels import AttentionOptions, PackedStep
from engine.kernels.cpu.attention import Plan, num_split_ranges, workspace_size
from engine.kernels.cpu.library import (
    Attention,
    Call,
    Gather,
    KernelTable,
    Linear,
    RMSNorm,
    Rows,
    WriteKV,
    kernel_table,
    library,
)
from engine.kernels.cpu.linear import PackedLinear, gather_arguments
from engine.kernels.cpu.run import address

Rotation = Literal["none", "halves", "pairs"]
"""Which dims of a head are rotated against each other: i and half the size + i, or neighbours."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm."""

    weight: Tensor
    """float32 [size], the factor itself (not the distance to 1 that some models store)."""
    eps: float


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: x += attention(norm(x)); x += mlp(norm(x)). With `norms_after`, what is added is normalised too."""

    index: int
    """Of the layer's cache."""
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    options: AttentionOptions
    attention_norm: Norm
    query_key_value: PackedLinear
    query_norm: Norm | None
    key_norm: Norm | None
    """Both or none, of each head; with the same eps."""
    rotation: Rotation
    output: PackedLinear
    mlp_norm: Norm
    gate_up: PackedLinear
    down: PackedLinear
    norms_after: tuple[Norm, Norm] | None = None
    residual_factor: float = 1.0
    """What is added is multiplied by it first."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What a model does before and after its layers."""

    embedding: PackedLinear | Tensor | None
    """The output layer that the embeddings are tied to, or a table [vocab_size, hidden_size] in the layers' dtype;
    None: hidden states are given."""
    norm: Norm
    output: PackedLinear


Caches = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Keys and values, by layer index."""

Angles = tuple[Tensor, Tensor]
"""cos and sin, [.., rotary_dim] in the layers' dtype."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the layers need to know of a step beside the hidden states."""

    angles: Angles | None
    """[T, rotary_dim], as the model's rotary embedding gives them; None if no layer is rotated."""
    slots: Tensor
    """int64 [T]"""
    plan: Plan
    caches: Caches


@dataclass(slots=True)
class _Buffers:
    """Room for the activations of `num_tokens` tokens."""

    num_tokens: int
    hidden: Tensor
    normed: Tensor
    query_key_value: Tensor
    attended: Tensor
    gated: Tensor


@dataclass(frozen=True, slots=True)
class _EndArguments:
    """The arguments of the calls at the ends, which each step changes."""

    gather: Gather | None
    norm: RMSNorm
    output: Linear


class Decoder:
    """Some layers in a row, and perhaps the rest of the model."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        *,
        ends: Ends | None = None,
        angles: Angles | None = None,
        variant: str | None = None,
    ) -> None:
        """`angles`: those of all positions, where there are ends and layers are rotated."""
        self.layers = tuple(layers)
        self.ends = ends
        self._angles = angles
        self.dtype = layers[0].query_key_value.dtype
        self._hidden_size = layers[0].query_key_value.in_features
        self.table: KernelTable = kernel_table(self.dtype, variant)
        # What changes from step to step; the calls point here.
        self._num_tokens = ctypes.c_int64()
        self._slots, self._positions = ctypes.c_void_p(), ctypes.c_void_p()
        self._cos, self._sin = (ctypes.c_void_p(address(values)) for values in angles or (None, None))
        self._num_wanted = ctypes.c_int64()
        self._at_ends: _EndArguments | None = None
        self._workspace_at = ctypes.c_void_p()
        self._rows = Rows()
        self._ticket = ctypes.c_int64(0)
        self._workspace = torch.empty(0)
        self._logits = torch.empty(0, 0)
        self._sinks = [
            None if layer.options.sinks is None else layer.options.sinks.float().contiguous() for layer in layers
        ]
        self._buffers = self._allocate(0)
        self._bound_to: tuple[Sequence[Tensor], Sequence[Tensor], int] | None = None
        self._args: list[ctypes.Structure] = []
        self._calls: ctypes.Array[Call] = (Call * 0)()

    def __call__(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """The layers applied to hidden [T, hidden_size]. The result is a buffer's: valid until the next call."""
        assert self.ends is None
        num_tokens = hidden.shape[0]
        self._bind(num_tokens, inputs.angles, inputs.caches)
        out = self._buffers.hidden[:num_tokens]
        out.copy_(hidden)
        if inputs.angles is not None:
            self._cos.value, self._sin.value = (values.data_ptr() for values in inputs.angles)
        self._slots.value = inputs.slots.data_ptr()
        ctypes.pointer(self._rows)[0] = inputs.plan.rows
        self._run(num_tokens, inputs.plan.num_split_ranges)
        return out

    def logits(self, step: PackedStep, caches: Caches, hidden: Tensor | None = None) -> Tensor:
        """With `ends`: float32 logits [L, vocab_size], valid until the next call.

        `hidden` [T, hidden_size]: where the embedding is not among the ends.
        """
        num_tokens, num_wanted = step.num_tokens, step.num_logits
        self._bind(max(num_tokens, num_wanted), self._angles, caches)
        ends = self._at_ends
        assert ends is not None
        first, _ = step.numbers.buffer_info()
        ids, positions, slots, query_starts, context_lens, block_tables, wanted = (
            first + 8 * place for place in step.places
        )
        if ends.gather is not None:
            ends.gather.ids = ids
        else:
            assert hidden is not None
            self._buffers.hidden[:num_tokens].copy_(hidden)
        if self._logits.shape[0] != num_wanted:
            self._logits = torch.empty(num_wanted, ends.output.out_features)
            ends.output.out = self._logits.data_ptr()
        self._num_wanted.value, ends.norm.index = num_wanted, wanted
        self._positions.value, self._slots.value = positions, slots
        rows = self._rows
        rows.num_rows, rows.block_size, rows.table_stride = step.num_rows, step.block_size, step.num_blocks
        rows.query_starts, rows.context_lens, rows.block_tables = query_starts, context_lens, block_tables
        self._run(num_tokens, num_split_ranges(step))
        return self._logits

    def _run(self, num_tokens: int, num_split_ranges: int) -> None:
        self._num_tokens.value = num_tokens
        if num_split_ranges:
            self._reserve_workspace(num_split_ranges)
        library().cl_run(ctypes.addressof(self._calls), len(self._calls), torch.get_num_threads())

    def replay(self, kernels: Collection[int]) -> None:
        """Run the last call's calls of these kernels (addresses of `table`) once more, without the others.

        For measuring: results are meaningless, in the cache too. The last call's inputs must be alive still.
        """
        chosen = [call for call in self._calls if call.kernel in kernels]
        calls = (Call * len(chosen))(*chosen)
        library().cl_run(ctypes.addressof(calls), len(calls), torch.get_num_threads())

    def _bind(self, num_tokens: int, angles: Angles | None, caches: Caches) -> None:
        """Make the list of calls anew if buffers must grow, or caches are others than before."""
        rotary_dim = 0 if angles is None else angles[0].shape[-1]
        if num_tokens > self._buffers.num_tokens:
            self._buffers = self._allocate(max(num_tokens, 2 * self._buffers.num_tokens))
            self._bound_to = None
        bound = self._bound_to
        keys, values = caches
        if bound and bound[0] is keys and bound[1] is values and bound[2] == rotary_dim:
            return
        calls = [
            call
            for layer, sinks in zip(self.layers, self._sinks, strict=True)
            for call in self._layer_calls(layer, sinks, (keys[layer.index], values[layer.index]), rotary_dim)
        ]
        if self.ends is not None:
            calls = self._with_ends(self.ends, calls)
        self._args = [args for _, args in calls]
        for args, following in pairwise(args for args in self._args if isinstance(args, Linear)):
            args.next = ctypes.addressof(following)
        self._calls = (Call * len(calls))(*(Call(kernel, ctypes.addressof(args)) for kernel, args in calls))
        self._bound_to = (keys, values, rotary_dim)

    def _with_ends(self, ends: Ends, calls: list[tuple[int, ctypes.Structure]]) -> list[tuple[int, ctypes.Structure]]:
        """Ids and rows that are wanted are set in each step."""
        hidden, normed = self._buffers.hidden, self._buffers.normed
        _, norm = self._norm(ends.norm, hidden, normed)
        _, output = self._linear(ends.output, normed, None)
        output.out, output.out_stride, output.out_float = self._logits.data_ptr(), ends.output.out_features, True
        for args in (norm, output):
            args.num_rows = ctypes.addressof(self._num_wanted)
        gather = None if ends.embedding is None else gather_arguments(ends.embedding, hidden)
        if gather is not None:
            gather.num_rows = ctypes.addressof(self._num_tokens)
            calls = [(self.table.gather, gather), *calls]
        self._at_ends = _EndArguments(gather, norm, output)
        return [*calls, (self.table.rms_norm, norm), (self.table.linear, output)]

    def _allocate(self, num_tokens: int) -> _Buffers:
        def rows(width: int) -> Tensor:
            return torch.empty(num_tokens, width, dtype=self.dtype)

        return _Buffers(
            num_tokens,
            hidden=rows(self._hidden_size),
            normed=rows(self._hidden_size),
            query_key_value=rows(max(layer.query_key_value.out_features for layer in self.layers)),
            attended=rows(max(layer.num_heads * layer.value_dim for layer in self.layers)),
            gated=rows(max(layer.gate_up.out_features for layer in self.layers)),
        )

    def _reserve_workspace(self, num_split_ranges: int) -> None:
        size = max(workspace_size(num_split_ranges, layer.num_heads, layer.value_dim) for layer in self.layers)
        if size > self._workspace.numel():
            self._workspace = torch.empty(size)
        self._workspace_at.value = self._workspace.data_ptr()

    def _layer_calls(
        self, layer: DecoderLayer, sinks: Tensor | None, caches: tuple[Tensor, Tensor], rotary_dim: int
    ) -> Iterator[tuple[int, ctypes.Structure]]:
        buffers = self._buffers
        after = layer.norms_after or (None, None)
        yield self._norm(layer.attention_norm, buffers.hidden, buffers.normed)
        yield self._linear(layer.query_key_value, buffers.normed, buffers.query_key_value)
        yield self._write_kv(layer, caches, rotary_dim)
        yield self._attention(layer, sinks, caches)
        yield from self._add(layer, layer.output, buffers.attended, after[0])
        yield self._norm(layer.mlp_norm, buffers.hidden, buffers.normed)
        yield self._linear(layer.gate_up, buffers.normed, buffers.gated)
        yield from self._add(layer, layer.down, buffers.gated, after[1])

    def _add(
        self, layer: DecoderLayer, linear: PackedLinear, x: Tensor, norm_after: Norm | None
    ) -> Iterator[tuple[int, ctypes.Structure]]:
        """hidden += linear(x), normalised before it is added if there is a norm for that."""
        hidden, normed = self._buffers.hidden, self._buffers.normed
        if norm_after is None:
            yield self._linear(linear, x, hidden, residual=hidden, factor=layer.residual_factor)
        else:
            yield self._linear(linear, x, normed)
            yield self._norm(norm_after, normed, hidden, residual_after=hidden)

    def _norm(self, norm: Norm, x: Tensor, out: Tensor, residual_after: Tensor | None = None) -> tuple[int, RMSNorm]:
        return self.table.rms_norm, RMSNorm(
            num_rows=ctypes.addressof(self._num_tokens),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            residual=address(residual_after),
            residual_stride=0 if residual_after is None else residual_after.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            weight=norm.weight.data_ptr(),
            size=norm.weight.numel(),
            eps=norm.eps,
            residual_after=residual_after is not None,
        )

    def _linear(
        self, linear: PackedLinear, x: Tensor, out: Tensor | None, residual: Tensor | None = None, factor: float = 1.0
    ) -> tuple[int, Linear]:
        args = linear.arguments(alpha=factor)
        args.num_rows = ctypes.addressof(self._num_tokens)
        args.x, args.x_stride = x.data_ptr(), x.stride(0)
        if out is not None:
            args.out, args.out_stride = out.data_ptr(), out.stride(0)
        if residual is not None:
            args.residual, args.residual_stride = residual.data_ptr(), residual.stride(0)
        return self.table.linear, args

    def _write_kv(
        self, layer: DecoderLayer, caches: tuple[Tensor, Tensor], rotary_dim: int
    ) -> tuple[int, ctypes.Structure]:
        fused = self._buffers.query_key_value
        key_at = layer.num_heads * layer.key_dim
        value_at = key_at + layer.num_kv_heads * layer.key_dim
        is_rotated = layer.rotation != "none"
        is_normed = layer.query_norm is not None and layer.key_norm is not None
        args = WriteKV(
            num_rows=ctypes.addressof(self._num_tokens),
            q=fused.data_ptr(),
            q_stride=fused.stride(0),
            k=fused.data_ptr() + key_at * fused.element_size(),
            k_stride=fused.stride(0),
            k_head_stride=layer.key_dim,
            v=fused.data_ptr() + value_at * fused.element_size(),
            v_stride=fused.stride(0),
            v_head_stride=layer.value_dim,
            cos=ctypes.addressof(self._cos) if is_rotated else None,
            sin=ctypes.addressof(self._sin) if is_rotated else None,
            positions=ctypes.addressof(self._positions),
            q_weight=None if layer.query_norm is None else layer.query_norm.weight.data_ptr(),
            k_weight=None if layer.key_norm is None else layer.key_norm.weight.data_ptr(),
            k_cache=caches[0].data_ptr(),
            v_cache=caches[1].data_ptr(),
            slots=ctypes.addressof(self._slots),
            num_heads=layer.num_heads if is_rotated or is_normed else 0,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            rotary_dim=rotary_dim,
            block_size=caches[0].shape[3],
            eps=0.0 if layer.query_norm is None else layer.query_norm.eps,
            rotates_pairs=layer.rotation == "pairs",
        )
        return self.table.write_kv[caches[0].dtype], args

    def _attention(
        self, layer: DecoderLayer, sinks: Tensor | None, caches: tuple[Tensor, Tensor]
    ) -> tuple[int, ctypes.Structure]:
        fused, attended = self._buffers.query_key_value, self._buffers.attended
        args = Attention(
            rows=ctypes.addressof(self._rows),
            q=fused.data_ptr(),
            q_stride=fused.stride(0),
            q_head_stride=layer.key_dim,
            out=attended.data_ptr(),
            out_stride=attended.stride(0),
            k_cache=caches[0].data_ptr(),
            v_cache=caches[1].data_ptr(),
            sinks=address(sinks),
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            window=layer.options.window or 0,
            scale=layer.options.scale,
            softcap=layer.options.softcap or 0.0,
            workspace=ctypes.addressof(self._workspace_at),
            ticket=ctypes.addressof(self._ticket),
        )
        return self.table.attention[caches[0].dtype], args
