"""Where and in what type the model computes."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import ConfigError
from engine.machine import available_memory, usable_cores

if TYPE_CHECKING:
    from engine.kernels import Kernels


def resolve_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means. Raises ConfigError when it is not there."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ConfigError(f"no such device: {name}", setting="device", hint="use auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ConfigError(
            f"this torch ({torch.__version__}) is built without CUDA",
            setting="device",
            hint="install torch's CUDA build, or use --device cpu",
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError(
            "torch sees no CUDA device",
            setting="device",
            hint="check nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES, or use --device cpu",
        )
    if int(index or 0) >= count:
        raise ConfigError(
            f"there is no cuda:{index}; torch sees {count} CUDA device{'s' if count > 1 else ''}",
            setting="device",
            hint="use " + ", ".join(f"cuda:{i}" for i in range(count)),
        )
    return torch.device("cuda", int(index or 0))


def resolve_dtype(name: str, device: torch.device, *, fuses: bool = False) -> torch.dtype:
    """The type that `auto`, `float32`, `bfloat16` or `float16` means on `device`.

    `fuses`: linear layers are computed by kernels that take bfloat16 as fast as it is read, on any processor.
    """
    if name == "auto":
        return torch.bfloat16 if fuses or computes_bfloat16(device) else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def resolve_cache_dtype(name: str, dtype: torch.dtype, kernels: Kernels) -> torch.dtype:
    """What `auto`, `float32`, `bfloat16` or `int8` means for the KV cache of a model in `dtype`.

    Raises ConfigError for what `kernels` do not store.
    """
    wanted = dtype if name == "auto" else getattr(torch, name)
    assert isinstance(wanted, torch.dtype), name
    there = kernels.cache_dtypes(dtype)
    if wanted not in there:
        kind, *others = (str(each).removeprefix("torch.") for each in (dtype, *there))
        raise ConfigError(
            f"the {kernels.NAME} kernels have no KV cache in {name} for a model in {kind}",
            setting="kv_cache_dtype",
            hint=f"use auto or {' or '.join(others)}",
        )
    return wanted


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 itself, instead of through float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if platform.machine().lower() in ("x86_64", "amd64"):
        # private, and the only thing that torch 2.11 to 2.15 has in common for the question
        checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return any(check() for check in checks if check is not None)
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text().split()  # Linux on ARM
    except OSError:
        return False


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return available_memory()


def use_threads(num_threads: int | None) -> None:
    """Compute with this many CPU threads; None: as many as torch would, but no more than the process may use.

    For the calling thread: OpenMP keeps the number per thread, so this is called in the one that runs the model.
    """
    if num_threads is None:
        num_threads = min(torch.get_num_threads(), usable_cores())
    torch.set_num_threads(num_threads)
