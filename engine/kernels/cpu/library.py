"""The C library of `csrc/`, and the structs that its kernels take: see `csrc/kernels.h` for what they mean.

The library is loaded with ctypes, after torch. It is not linked with an OpenMP runtime: its OpenMP symbols become those
of the runtime that torch has loaded for all to see, so that there is one pool of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

ABI = 3
"""CL_ABI in `csrc/kernels.h`."""

VARIANTS = ("amx", "avx512bf16", "avx512", "avx2")
"""Instruction sets, the fastest first."""


DIRECTORY = Path(__file__).parent
"""Where the built library lies."""


class KernelsMissing(Exception):
    """The C kernels cannot be used here. The text says why, and what to do."""


class Call(Structure):
    """A kernel, and the struct with its arguments."""

    _fields_ = (("kernel", c_void_p), ("args", c_void_p))


class Linear(Structure):
    """struct cl_linear"""

    _fields_ = (
        ("num_rows", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("next", c_void_p),
        ("alpha", c_float),
        ("activation", c_int32),
        ("out_float", c_int32),
    )


class Gather(Structure):
    """struct cl_gather"""

    _fields_ = (
        ("num_rows", c_void_p),
        ("ids", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("in_features", c_int64),
        ("total_strips", c_int64),
    )


class RMSNorm(Structure):
    """struct cl_rms_norm"""

    _fields_ = (
        ("num_rows", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("index", c_void_p),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("sum", c_void_p),
        ("sum_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("weight", c_void_p),
        ("size", c_int64),
        ("eps", c_float),
        ("residual_after", c_int32),
    )


class ActAndMul(Structure):
    """struct cl_act_and_mul"""

    _fields_ = (
        ("num_rows", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("size", c_int64),
        ("activation", c_int32),
    )


class Rows(Structure):
    """struct cl_rows"""

    _fields_ = (
        ("num_rows", c_int64),
        ("block_size", c_int64),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
    )


class WriteKV(Structure):
    """struct cl_write_kv"""

    _fields_ = (
        ("num_rows", c_void_p),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("k", c_void_p),
        ("k_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v", c_void_p),
        ("v_stride", c_int64),
        ("v_head_stride", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("q_weight", c_void_p),
        ("k_weight", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("slots", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("rotary_dim", c_int64),
        ("block_size", c_int64),
        ("eps", c_float),
        ("rotates_pairs", c_int32),
    )


class Attention(Structure):
    """struct cl_attention"""

    _fields_ = (
        ("rows", c_void_p),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("q_head_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("sinks", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("workspace", c_void_p),
        ("ticket", c_void_p),
    )


class Sample(Structure):
    """struct cl_sample"""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("size", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
        ("tokens", c_void_p),
        ("workspace", c_void_p),
        ("ticket", c_void_p),
    )


class Pack(Structure):
    """struct cl_pack"""

    _fields_ = (
        ("source", c_void_p),
        ("packed", c_void_p),
        ("rows", c_int64),
        ("in_features", c_int64),
        ("elem_bytes", c_int64),
        ("pk", c_int64),
        ("first", c_int64),
        ("spread", c_int64),
        ("offset", c_int64),
        ("total_strips", c_int64),
    )


class _Kernels(Structure):
    """struct cl_kernels"""

    _fields_ = (
        ("name", c_char_p),
        ("linear", c_void_p * 2),
        ("gather", c_void_p * 2),
        ("rms_norm", c_void_p * 2),
        ("act_and_mul", c_void_p * 2),
        ("write_kv", c_void_p * 3 * 2),
        ("attention", c_void_p * 3 * 2),
        ("sample", c_void_p),
    )


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The kernels of one instruction set for one element type, as addresses."""

    variant: str
    linear: int
    gather: int
    rms_norm: int
    act_and_mul: int
    write_kv: Mapping[torch.dtype, int]
    """By what the cache holds: what `cache_dtypes` says."""
    attention: Mapping[torch.dtype, int]
    sample: int


def is_supported(dtype: torch.dtype) -> bool:
    """Whether the kernels compute in this type."""
    return dtype in (torch.float32, torch.bfloat16)


def cache_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What a cache can hold where the kernels compute in `dtype`: that, and what is narrower. By CL_CACHE_..."""
    return (dtype, torch.int8) if dtype == torch.bfloat16 else (dtype, torch.int8, torch.bfloat16)


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises KernelsMissing."""
    found = sorted(DIRECTORY.glob("_kernels*.so"))
    if not found:
        raise KernelsMissing("the C kernels were not built: install again with a C compiler on an x86-64 host")
    try:
        lib = ctypes.CDLL(str(found[0]))
    except OSError as error:
        raise KernelsMissing(f"the C kernels do not load: {error}") from error
    if getattr(lib, "cl_abi", int)() != ABI:
        raise KernelsMissing("the C kernels were built for another version: install again (make serve does)")
    lib.cl_choose.argtypes, lib.cl_choose.restype = (c_char_p,), POINTER(_Kernels)
    lib.cl_run.argtypes, lib.cl_run.restype = (c_void_p, c_int64, c_int), None
    lib.cl_pack_weight.argtypes, lib.cl_pack_weight.restype = (c_void_p, c_int), None
    lib.cl_openmp_path.argtypes, lib.cl_openmp_path.restype = (), c_char_p
    return lib


def variants() -> tuple[str, ...]:
    """The instruction sets that this processor has kernels for, the fastest first. Raises KernelsMissing."""
    return tuple(name for name in VARIANTS if library().cl_choose(name.encode()))


@cache
def kernel_table(dtype: torch.dtype, variant: str | None = None) -> KernelTable:
    """The kernels for a type; of the fastest instruction set unless `variant` names one. Raises KernelsMissing."""
    assert is_supported(dtype), dtype
    there = variants()
    variant = variant or (there[0] if there else "avx2")
    if variant not in there:
        raise KernelsMissing(f"this processor has no {variant}")
    kernels = library().cl_choose(variant.encode()).contents
    index = int(dtype == torch.bfloat16)
    names = ("linear", "gather", "rms_norm", "act_and_mul")
    by_type = {name: getattr(kernels, name)[index] for name in names}
    caches = cache_dtypes(dtype)
    return KernelTable(
        variant=variant,
        sample=kernels.sample,
        write_kv=dict(zip(caches, kernels.write_kv[index], strict=False)),
        attention=dict(zip(caches, kernels.attention[index], strict=False)),
        **by_type,
    )


def openmp_path() -> str:
    """The file of the OpenMP runtime that the kernels run on; it should be torch's. Raises KernelsMissing."""
    path: bytes = library().cl_openmp_path()
    return path.decode()
