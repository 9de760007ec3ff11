"""What the probe finds out about a model, and mistakes that only its comparison can find.

Whole families, served and refused, are in `tests/integration/test_oracle_*`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ModelError
from engine.kernels import reference
from engine.kv.storage import LayerSpec
from engine.model import attention
from engine.model.probe import AttentionLayer, probe_model
from tests.factories_models import tiny_config, tiny_model

SLIDING = ["sliding_attention", "full_attention"]


@pytest.fixture(autouse=True)
def _registered() -> None:
    attention.register()


def probe(model_type: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> tuple[AttentionLayer, ...]:
    return probe_model(tiny_model(tiny_config(model_type, **overrides)).to(dtype), reference, 256)


def test_plain_layers() -> None:
    layer = AttentionLayer(num_heads=4, spec=LayerSpec(2, 8, 8), window=None, softcap=None, has_sinks=False)
    assert probe("llama") == (layer, layer)


def test_windows_soft_caps_and_sinks() -> None:
    assert [(layer.window, layer.softcap) for layer in probe("gemma2")] == [(8, 2.0), (None, 2.0)]
    assert [(layer.window, layer.has_sinks) for layer in probe("gpt_oss")] == [(8, True), (None, True)]


def test_keys_and_values_of_different_size() -> None:
    assert probe("deepseek_v3")[0].spec == LayerSpec(num_kv_heads=4, key_dim=16, value_dim=8)


def test_the_model_is_left_attending_to_the_paged_cache() -> None:
    model = tiny_model(tiny_config("mistral", sliding_window=100))
    layers = probe_model(model, reference, 256)
    assert model.config._attn_implementation == attention.ATTENTION_NAME
    assert model.config.sliding_window == 100  # shrunk meanwhile
    assert [layer.window for layer in layers] == [100, 100]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [8, 100])
def test_a_window_that_layers_do_not_tell_of(window: int, dtype: torch.dtype) -> None:
    """qwen2_moe builds sliding masks, but its layers call the attention without a window."""
    overrides = {"use_sliding_window": True, "sliding_window": window, "layer_types": SLIDING}
    with pytest.raises(ModelError, match="logits in a packed step"):
        probe("qwen2_moe", dtype=dtype, **overrides)


def test_a_window_that_no_request_outgrows_does_not_matter() -> None:
    probe("qwen2_moe", use_sliding_window=True, sliding_window=256, layer_types=SLIDING)


def test_a_window_that_cannot_be_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is kept where the probe does not look for it, so that it cannot be shrunk."""
    model = tiny_model(tiny_config("mistral", sliding_window=100))
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", _with_window_of_its_own(model))
    with pytest.raises(ModelError, match="windows of its layers cannot be tried out"):
        probe_model(model, reference, 256)


def _with_window_of_its_own(model: Any) -> Any:
    original = type(model.model.layers[0].self_attn).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        window, self.config.sliding_window = self.config.sliding_window, 100
        try:
            return original(self, *args, **kwargs)
        finally:
            self.config.sliding_window = window

    return forward


def test_positions_of_neighbours_that_change_a_request() -> None:
    """phimoe scales its embeddings by the longest position in the batch, in its own way."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "short_mscale": 1.0,
        "long_mscale": 1.5,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model(tiny_config("phimoe", rope_parameters=rope, original_max_position_embeddings=64))
    with pytest.raises(ModelError, match="logits in a packed step"):
        probe_model(model, reference, 256)
    model.set_attn_implementation("eager")
    probe_model(model, reference, 64)


def test_sixteen_bits_are_compared_with_more_patience() -> None:
    assert len(probe("llama", dtype=torch.bfloat16)) == 2


def test_logits_that_are_not_finite() -> None:
    model = tiny_model(tiny_config("llama"))
    model.model.norm.weight.data[0] = torch.inf
    with pytest.raises(ModelError, match="not finite in float32") as caught:
        probe_model(model, reference, 256)
    assert caught.value.setting == "dtype"


def test_whatever_the_models_code_raises_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tiny_config("llama"))
    monkeypatch.setattr(model, "forward", lambda **_: {}["nothing"])
    with pytest.raises(ModelError, match=r"this llama model cannot be served: .* KeyError: 'nothing'"):
        probe_model(model, reference, 256)
