"""Linear layers through float32 while a model is tried out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.schema import DType, ModelConfig
from engine.model import wide
from engine.model.loader import load_model
from tests.factories_models import save_tiny_model, tiny_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_widened", [1 << 24, 100, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_results_are_rounded_as_bfloat16s_are(monkeypatch: pytest.MonkeyPatch, max_widened: int, bias: bool) -> None:
    """Whatever share of the weights is float32 at a time."""
    monkeypatch.setattr(wide, "computes_bfloat16", lambda _: False)
    monkeypatch.setattr(wide, "MAX_WIDENED", max_widened)
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 33, bias=bias).bfloat16(), torch.randn(2, 5, 40).bfloat16()
    with torch.no_grad(), wide.affordable_linears(CPU, torch.bfloat16):
        out = layer(x)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "can_multiply", "is_wide"),
    [("bfloat16", False, True), ("bfloat16", True, False), ("float32", False, False)],
)
def test_it_is_for_the_trial_where_it_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: DType, can_multiply: bool, is_wide: bool
) -> None:
    """And for nothing that the model computes afterwards."""
    num_calls = 0
    linear = wide._linear

    def counted(*args: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return linear(*args)

    monkeypatch.setattr(wide, "_linear", counted)
    monkeypatch.setattr(wide, "computes_bfloat16", lambda _: can_multiply)
    path = save_tiny_model(tmp_path, tiny_config("llama"))
    loaded = load_model(path, ModelConfig(device="cpu", dtype=dtype, kernels="reference", num_threads=1))
    assert (num_calls > 0) == is_wide
    before = num_calls
    loaded.model.get_output_embeddings()(torch.zeros(1, loaded.model.config.hidden_size, dtype=loaded.dtype))
    assert num_calls == before
