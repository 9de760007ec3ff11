"""The paged cache and attention over it, in C: `write_kv` and `paged_attention` of the contract.

How keys and values lie in the cache is drawn at struct cl_write_kv in `csrc/kernels.h`. Results do not depend on the
batch, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.kernels import AttentionOptions, IntArray, PackedRows, PackedStep
from engine.kernels.cpu.library import Attention, Rows, WriteKV, kernel_table
from engine.kernels.cpu.run import elements_per_pack, run, threads_for
from engine.kernels.quantized import SCALE_BYTES

RANGE = 512
"""Tokens of context that one thread passes at a time when a row has one token (RANGE in `csrc/attention.inc.h`)."""
MAX_HEAD_DIM = 512
BLOCK_MULTIPLE = 16


def empty_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """One layer's keys [num_blocks, G, key_dim / PK, block_size, PK] and values [num_blocks, G, block_size / PK,
    value_dim, PK], holding anything. `dims`: key_dim (an odd one is rounded up to whole packs) and value_dim.

    `dtype` is that of queries; of `cache_dtype` are keys and values. Both tensors are views: values have padding, and
    int8s have scales between a head of a block and the next.
    Raises ValueError for heads that are too large for the kernels.
    """
    key_dim, value_dim = dims
    assert block_size % BLOCK_MULTIPLE == 0, block_size
    if max(dims) > MAX_HEAD_DIM:
        raise ValueError(f"heads of {max(dims)} dims; the C kernels take {MAX_HEAD_DIM}: use --kernels reference")
    pk = elements_per_pack(dtype) if cache_dtype == dtype else 1
    num_packs, width = -(-key_dim // pk), -(-value_dim // 16) * 16
    scale_bytes = SCALE_BYTES if cache_dtype == torch.int8 else 0

    def heads(num_elements: int) -> Tensor:
        whole = torch.empty(num_blocks, num_kv_heads, block_size * (num_elements + scale_bytes), dtype=cache_dtype)
        return whole[..., : block_size * num_elements]

    keys = heads(num_packs * pk).view(num_blocks, num_kv_heads, num_packs, block_size, pk)
    values = heads(width).view(num_blocks, num_kv_heads, block_size // pk, width, pk)
    return keys, values[..., :value_dim, :]


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's rows, as the kernels read them. Keeps alive what `rows` points to."""

    rows: Rows
    arrays: tuple[IntArray, ...]
    num_split_ranges: int
    """See `num_split_ranges`."""
    ticket: IntArray
    """[1], 0: how threads share out the work."""


def plan_attention(packed: PackedRows) -> Plan:
    """See `Kernels`."""
    arrays = tuple(
        np.ascontiguousarray(array, dtype=np.int64)
        for array in (packed.query_starts, packed.context_lens, packed.block_tables)
    )
    starts, contexts, tables = arrays
    rows = Rows(
        num_rows=len(contexts),
        block_size=packed.block_size,
        query_starts=starts.ctypes.data,
        context_lens=contexts.ctypes.data,
        block_tables=tables.ctypes.data,
        table_stride=tables.shape[1],
    )
    return Plan(rows, arrays, _num_split_ranges(starts.tolist(), contexts.tolist()), np.zeros(1, dtype=np.int64))


def num_split_ranges(step: PackedStep) -> int:
    """Ranges of the rows that have one token and more context than one range."""
    *_, starts, contexts, tables, _ = step.places
    return _num_split_ranges(step.numbers[starts:contexts], step.numbers[contexts:tables])


def _num_split_ranges(starts: Sequence[int], contexts: Sequence[int]) -> int:
    return sum(
        -(-length // RANGE)
        for (first, last), length in zip(pairwise(starts), contexts, strict=True)
        if length > RANGE and last - first == 1
    )


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, variant: str | None = None
) -> None:
    """See `Kernels`."""
    key, value = _dense_heads(key), _dense_heads(value)
    num_tokens, num_kv_heads, key_dim = key.shape
    pk = k_cache.shape[4]
    assert k_cache.shape[1:3] == (num_kv_heads, -(-key_dim // pk)), (k_cache.shape, key.shape)
    assert (v_cache.shape[1], v_cache.shape[3]) == value.shape[1:], (v_cache.shape, value.shape)
    count, slots_at = ctypes.c_int64(num_tokens), ctypes.c_void_p(slots.data_ptr())
    args = WriteKV(
        num_rows=ctypes.addressof(count),
        k=key.data_ptr(),
        k_stride=key.stride(0),
        k_head_stride=key.stride(1),
        v=value.data_ptr(),
        v_stride=value.stride(0),
        v_head_stride=value.stride(1),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        slots=ctypes.addressof(slots_at),
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value.shape[2],
        block_size=k_cache.shape[3],
    )
    run(
        kernel_table(key.dtype, variant).write_kv[k_cache.dtype],
        args,
        max_threads=threads_for(key.nbytes + value.nbytes),
    )


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, options: AttentionOptions, variant: str | None = None
) -> Tensor:
    """See `Kernels`."""
    query = _dense_heads(query)
    num_tokens, num_heads, key_dim = query.shape
    value_dim = v_cache.shape[3]
    assert num_heads % k_cache.shape[1] == 0, (query.shape, k_cache.shape)
    assert k_cache.shape[2] == -(-key_dim // k_cache.shape[4]), (query.shape, k_cache.shape)
    output = query.new_empty(num_tokens, num_heads, value_dim)
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    workspace = torch.empty(workspace_size(plan.num_split_ranges, num_heads, value_dim), dtype=torch.float32)
    workspace_at = ctypes.c_void_p(workspace.data_ptr())
    args = Attention(
        rows=ctypes.addressof(plan.rows),
        q=query.data_ptr(),
        q_stride=query.stride(0),
        q_head_stride=query.stride(1),
        out=output.data_ptr(),
        out_stride=output.stride(0),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        num_heads=num_heads,
        num_kv_heads=k_cache.shape[1],
        key_dim=key_dim,
        value_dim=value_dim,
        window=options.window or 0,
        scale=options.scale,
        softcap=options.softcap or 0.0,
        workspace=ctypes.addressof(workspace_at),
        ticket=plan.ticket.ctypes.data,
    )
    run(kernel_table(query.dtype, variant).attention[k_cache.dtype], args)
    return output


def workspace_size(num_split_ranges: int, num_heads: int, value_dim: int) -> int:
    """Floats that attention needs to hold the ranges that are merged afterwards."""
    return num_split_ranges * num_heads * (-(-value_dim // 16) * 16 + 2)


def _dense_heads(tensor: Tensor) -> Tensor:
    """[T, heads, dim] with the dims of a head side by side."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
