"""Which device and type are meant, and what is said when they are not there."""

from __future__ import annotations

import os

import pytest
import torch

from engine.errors import ConfigError
from engine.kernels import choose
from engine.model import device
from engine.model.device import free_memory, resolve_cache_dtype, resolve_device, resolve_dtype, use_threads
from tests.cpu_kernels import build_kernels

CPU = torch.device("cpu")


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("auto", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cuda", 2, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_device(monkeypatch: pytest.MonkeyPatch, name: str, count: int, expected: str) -> None:
    pretend_cuda(monkeypatch, count)
    assert resolve_device(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "count", "message", "hint"),
    [
        ("cuda", 0, "sees no CUDA device", "nvidia-smi"),
        ("cuda:2", 2, "no cuda:2; torch sees 2 CUDA devices", "cuda:0, cuda:1"),
        ("tpu", 0, "no such device: tpu", "cuda:N"),
        ("cpu:1", 0, "no such device: cpu:1", "cuda:N"),
        ("cuda:x", 1, "no such device: cuda:x", "cuda:N"),
        ("cuda:-1", 1, "no such device: cuda:-1", "cuda:N"),
    ],
)
def test_no_such_device(monkeypatch: pytest.MonkeyPatch, name: str, count: int, message: str, hint: str) -> None:
    pretend_cuda(monkeypatch, count)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_device(name)
    assert caught.value.setting == "device"
    assert hint in (caught.value.hint or "")


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="built without CUDA"):
        resolve_device("cuda")


def test_dtype_by_name() -> None:
    assert resolve_dtype("float16", CPU) == torch.float16


@pytest.mark.parametrize(("computes", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_dtype_auto(monkeypatch: pytest.MonkeyPatch, computes: bool, expected: torch.dtype) -> None:
    monkeypatch.setattr(device, "computes_bfloat16", lambda _: computes)
    assert resolve_dtype("auto", CPU) == expected
    assert resolve_dtype("auto", CPU, fuses=True) == torch.bfloat16
    assert resolve_dtype("float32", CPU, fuses=True) == torch.float32


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float16, torch.float16),
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.float32, torch.bfloat16),
        ("int8", torch.float32, torch.int8),
        ("int8", torch.float16, torch.int8),
    ],
)
def test_dtype_of_the_cache(name: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    assert resolve_cache_dtype(name, dtype, choose("reference", CPU, dtype, 32)) == expected


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_a_cache_that_is_wider_than_the_model_is_refused(kernels: str) -> None:
    if kernels == "cpu":
        build_kernels()
    back_end = choose(kernels, CPU, torch.bfloat16, 32)
    with pytest.raises(
        ConfigError, match=f"the {kernels}.* kernels have no KV cache in float32 .* in bfloat16"
    ) as error:
        resolve_cache_dtype("float32", torch.bfloat16, back_end)
    assert error.value.setting == "kv_cache_dtype"
    assert error.value.hint == "use auto or bfloat16 or int8"


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_bfloat16_on_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool) -> None:
    pretend_cuda(monkeypatch, 1, capability)
    assert device.computes_bfloat16(torch.device("cuda:0")) is expected


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_bfloat16_on_x86(monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool) -> None:
    monkeypatch.setattr(device.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    assert device.computes_bfloat16(CPU) is (avx512 or amx)


def test_threads() -> None:
    before = torch.get_num_threads()
    try:
        use_threads(3)
        assert torch.get_num_threads() == 3
        use_threads(None)
        assert torch.get_num_threads() == min(3, len(os.sched_getaffinity(0)))
    finally:
        torch.set_num_threads(before)


def test_free_memory_of_the_host() -> None:
    assert free_memory(CPU) > 0
