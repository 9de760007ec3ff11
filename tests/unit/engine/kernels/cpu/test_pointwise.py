import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.cpu.pointwise import act_and_mul, rms_norm

SIZES = [1, 8, 15, 16, 17, 64, 576, 1000]


def tolerance(dtype: torch.dtype) -> float:
    return 2e-2 if dtype == torch.bfloat16 else 1e-5


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(variant: str, dtype: torch.dtype, size: int) -> None:
    x, weight = torch.randn(7, size).to(dtype), torch.randn(size)
    out, total = rms_norm(x, weight, 1e-5, variant=variant)
    assert total is x
    torch.testing.assert_close(out.double(), normalised(x, weight, 1e-5), rtol=tolerance(dtype), atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_with_residual(variant: str, dtype: torch.dtype, size: int) -> None:
    x, residual, weight = torch.randn(7, size).to(dtype), torch.randn(7, size).to(dtype), torch.randn(size)
    out, total = rms_norm(x, weight, 1e-5, residual, variant=variant)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out.double(), normalised(total, weight, 1e-5), rtol=tolerance(dtype), atol=1e-5)


def test_a_row_of_nan_stays_alone(variant: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 40).to(dtype)
    clean, _ = rms_norm(x, None, 1e-5, variant=variant)
    x[2, 7] = torch.nan
    out, _ = rms_norm(x, None, 1e-5, variant=variant)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "none"])
def test_act_and_mul(variant: str, dtype: torch.dtype, activation: str, size: int) -> None:
    x = 3 * torch.randn(7, 2 * size).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    expected = {
        "silu": F.silu(gate),
        "gelu_tanh": F.gelu(gate, approximate="tanh"),
        "gelu": F.gelu(gate),
        "none": gate,
    }[activation]
    out = act_and_mul(x, activation, variant=variant)
    torch.testing.assert_close(out.double(), expected * up, rtol=tolerance(dtype), atol=tolerance(dtype))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_activations_far_out(variant: str, activation: str) -> None:
    """Where exponentials overflow or vanish, an activation is 0 or the identity, and NaN stays NaN."""
    gate = torch.tensor([-1e30, -200.0, -90.0, 90.0, 200.0, 1e30, torch.nan, 0.0])
    out = act_and_mul(torch.cat([gate, torch.ones(8)]), activation, variant=variant)
    assert torch.equal(out[3:6], gate[3:6])
    assert out[:3].abs().max() < 1e-30
    assert out[6].isnan()
    assert out[7] == 0
