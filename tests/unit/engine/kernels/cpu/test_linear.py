import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.cpu.linear import PackedLinear, can_pack, pack_gated, pack_linear
from engine.kernels.cpu.run import run

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}
SHAPES = [(1, 2), (16, 16), (17, 34), (100, 70), (192, 576), (130, 1026), (64, 2100)]
"""Outputs and inputs: around strips, groups, k blocks and chunks."""


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """To the rounding of the type, relative to the largest number."""
    scale = expected.abs().max().clamp(min=1e-3)
    tolerance = 1e-2 if actual.dtype == torch.bfloat16 else 5e-6
    assert ((actual.double() - expected).abs().max() / scale) < tolerance


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_linear(variant: str, dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    weight, bias = random(num_outputs, num_inputs, dtype=dtype), random(num_outputs, dtype=dtype)
    layer = pack_linear([weight], [bias], variant=variant)
    for num_rows in (1, 2, 5, 6, 7, 31, 32, 33, 70, 101):
        x = random(num_rows, num_inputs, dtype=dtype)
        assert_close(layer(x), F.linear(x.double(), weight.double(), bias.double()))


def test_residual_and_factor(variant: str, dtype: torch.dtype) -> None:
    weight, residual = random(50, 64, dtype=dtype), random(9, 50, dtype=dtype)
    layer = pack_linear([weight], [None], variant=variant)
    x = random(9, 64, dtype=dtype)
    expected = residual.double() + 0.25 * (x.double() @ weight.double().T)
    assert_close(layer(x, residual, alpha=0.25), expected)


def test_float_output_is_not_rounded(variant: str) -> None:
    weight, x = random(40, 64, dtype=torch.bfloat16), random(3, 64, dtype=torch.bfloat16)
    out = pack_linear([weight], [None], variant=variant)(x, float_output=True)
    assert out.dtype == torch.float32
    assert_close(out, x.double() @ weight.double().T)


def test_several_matrices_in_one(variant: str, dtype: torch.dtype) -> None:
    """As query, key and value projections: sizes that are no multiples of a strip, a bias on one of them."""
    weights = [random(n, 48, dtype=dtype) for n in (27, 9, 40)]
    bias = random(9, dtype=dtype)
    x = random(11, 48, dtype=dtype)
    out = pack_linear(weights, [None, bias, None], variant=variant)(x)
    expected = torch.cat([x.double() @ weight.double().T for weight in weights], dim=1)
    expected[:, 27:36] += bias.double()
    assert_close(out, expected)


@pytest.mark.parametrize("activation", ACTS)
@pytest.mark.parametrize("size", [16, 33, 100])
def test_gated(variant: str, dtype: torch.dtype, activation: str, size: int) -> None:
    gate, up = random(size, 64, dtype=dtype), random(size, 64, dtype=dtype)
    biases = random(size, dtype=dtype), random(size, dtype=dtype)
    x = random(13, 64, dtype=dtype) / 4
    out = pack_gated((gate, up), biases, activation, variant=variant)(x)
    g = F.linear(x.double(), gate.double(), biases[0].double())
    u = F.linear(x.double(), up.double(), biases[1].double())
    assert_close(out, ACTS[activation](g) * u)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(100, 70), (192, 576)])
def test_int8(variant: str, dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    weight = random(num_outputs, num_inputs, dtype=dtype) * torch.rand(num_outputs, 1).to(dtype)
    x = random(40, num_inputs, dtype=dtype)
    layer = pack_linear([weight], [None], int8=True, variant=variant)
    assert layer.weight.dtype == torch.int8
    step = weight.double().abs().amax(dim=1, keepdim=True) / 127
    assert_close(layer(x), x.double() @ ((weight.double() / step).round() * step).T)


def test_int8_keeps_an_output_without_weights_at_zero(variant: str) -> None:
    layer = pack_linear([torch.zeros(3, 16)], [None], int8=True, variant=variant)
    assert torch.equal(layer(torch.ones(2, 16)), torch.zeros(2, 3))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_does_not_depend_on_its_neighbours(
    variant: str, dtype: torch.dtype, int8: bool, num_threads: int
) -> None:
    """Bit for bit, whatever the number of rows and threads."""
    layer = pack_linear([random(100, 2100, dtype=dtype)], [None], int8=int8, variant=variant)
    x = random(130, 2100, dtype=dtype)
    alone = torch.cat([layer(row) for row in x.split(1)])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows in (130, 97, 96, 64, 33, 7):
            assert torch.equal(layer(x[:num_rows]), alone[:num_rows])
            assert torch.equal(layer(x[-num_rows:]), alone[-num_rows:])
    finally:
        torch.set_num_threads(before)


def test_nothing_but_the_output_is_written(variant: str, dtype: torch.dtype) -> None:
    layer = pack_linear([random(37, 40, dtype=dtype)], [None], variant=variant)
    x = random(10, 64, dtype=dtype)[:, 3:43]  # a stride of its own
    out = torch.full((12, 50), torch.nan, dtype=dtype)
    num_rows = ctypes.c_int64(10)
    args = layer.arguments()
    args.num_rows = ctypes.addressof(num_rows)
    args.x, args.x_stride = x.data_ptr(), x.stride(0)
    args.out, args.out_stride = out[1].data_ptr() + 5 * out.element_size(), out.stride(0)
    run(layer.kernel, args)
    inside = out[1:11, 5:42]
    assert torch.equal(inside, layer(x))
    assert int(out.isnan().sum()) == out.numel() - inside.numel()


def test_shape_of_the_input_is_kept(variant: str) -> None:
    layer: PackedLinear = pack_linear([torch.randn(8, 16)], [None], variant=variant)
    assert layer(torch.randn(1, 5, 16)).shape == (1, 5, 8)


def test_what_cannot_be_packed() -> None:
    assert can_pack(torch.zeros(4, 3))
    assert not can_pack(torch.zeros(4, 3, dtype=torch.bfloat16))  # pairs of inputs
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float16))
