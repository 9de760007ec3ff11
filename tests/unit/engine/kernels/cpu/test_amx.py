"""The AMX variant of the linear layers on hosts without AMX: the same C code, its tile instructions in software."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.cpu import library
from engine.kernels.cpu.library import variants
from engine.kernels.cpu.linear import PackedLinear, pack_gated, pack_linear
from tests.cpu_kernels import AVX512_EMULATED, SOURCES, copy_without_avx512

HERE = Path(__file__).parent
Kernel = Callable[[int, int, int], None]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The linear kernel for bfloat16."""
    if "avx512bf16" not in variants():
        pytest.skip("this processor has no avx512bf16, which the AMX variant needs beside AMX")
    folder = tmp_path_factory.mktemp("amx")
    path, sources = folder / "amx.so", SOURCES
    flags = ["-std=gnu11", "-O1", "-ffp-contract=off", "-fPIC", "-shared"]
    if os.environ.get("EMULATE_AVX512"):  # set by test_emulated.py
        sources = copy_without_avx512(SOURCES, folder / "csrc")
        flags += [*AVX512_EMULATED, "-Wno-psabi"]
    flags += ["-include", str(HERE / "amx_emulated.h")]
    subprocess.run(["cc", *flags, str(sources / "amx.c"), "-o", str(path), "-lm"], check=True)
    table = library._Kernels.in_dll(ctypes.CDLL(str(path)), "cl_kernels_amx")
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return prototype(table.linear[1])


def compute(kernel: Kernel, layer: PackedLinear, x: Tensor) -> Tensor:
    out = torch.full((x.shape[0], layer.out_features), torch.nan, dtype=torch.bfloat16)
    num_rows = ctypes.c_int64(x.shape[0])
    args = layer.arguments()
    args.num_rows = ctypes.addressof(num_rows)
    args.x, args.x_stride = x.data_ptr(), x.stride(0)
    args.out, args.out_stride = out.data_ptr(), out.stride(0)
    kernel(ctypes.addressof(args), 0, 1)
    return out


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 2), (16, 32), (100, 70), (130, 96), (33, 2080)])
def test_linear(kernel: Kernel, num_outputs: int, num_inputs: int, int8: bool) -> None:
    weight, bias = torch.randn(num_outputs, num_inputs).bfloat16(), torch.randn(num_outputs).bfloat16()
    layer = pack_linear([weight], [bias], int8=int8)
    wide = weight.double()
    if int8:
        step = wide.abs().amax(dim=1, keepdim=True) / 127
        wide = (wide / step).round() * step
    for num_rows in (1, 5, 16, 17, 32, 33, 70, 100):
        x = torch.randn(num_rows, num_inputs).bfloat16()
        expected = F.linear(x.double(), wide, bias.double())
        out = compute(kernel, layer, x)
        assert (out.double() - expected).abs().max() < 1e-2 * expected.abs().max()
        assert torch.equal(out[-1:], compute(kernel, layer, x[-1:])), "a row depends on its neighbours"


def test_gated(kernel: Kernel) -> None:
    gate, up = torch.randn(40, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    x = torch.randn(20, 64).bfloat16() / 4
    expected = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    out = compute(kernel, pack_gated((gate, up), (None, None), "silu"), x)
    assert (out.double() - expected).abs().max() < 1e-2 * expected.abs().max()
