"""Rotary embeddings that transformers would choose by the longest sequence of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.model.loader import resolve_max_model_len
from engine.model.rope import pin_rope, short_range, tabulate
from tests.factories_models import tiny_config, tiny_model

THETA = {"rope_theta": 10000.0}
LONGROPE = THETA | {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}
DYNAMIC = THETA | {"rope_type": "dynamic", "factor": 4.0}


def config(parameters: dict[str, Any]) -> Any:
    return tiny_config("llama", rope_parameters=dict(parameters))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (THETA | {"rope_type": "default"}, None),
        (THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, None),
        (LONGROPE, 64),
        (DYNAMIC, 256),
    ],
)
def test_short_range(parameters: dict[str, Any], expected: int | None) -> None:
    assert short_range(config(parameters)) == expected


def test_short_range_by_layer_type() -> None:
    nested = {"sliding_attention": THETA | {"rope_type": "default"}, "full_attention": dict(LONGROPE)}
    assert short_range(tiny_config("gemma3_text", rope_parameters=nested)) == 64


@pytest.mark.parametrize(
    ("parameters", "asked", "expected"),
    [
        (THETA | {"rope_type": "default"}, None, 256),
        (THETA | {"rope_type": "default"}, 100, 100),
        (LONGROPE, None, 64),
        (LONGROPE, 256, 256),
        (DYNAMIC, None, 256),
        (DYNAMIC, 1000, 1000),
    ],
)
def test_context_length(parameters: dict[str, Any], asked: int | None, expected: int) -> None:
    assert resolve_max_model_len(config(parameters), asked) == expected


@pytest.mark.parametrize("parameters", [THETA | {"rope_type": "default"}, LONGROPE])
def test_longer_than_the_model_was_made_for(parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at most 256 tokens") as caught:
        resolve_max_model_len(config(parameters), 257)
    assert caught.value.setting == "max_model_len"


def cosines(model: Any, positions: list[int]) -> torch.Tensor:
    cos, _ = model.model.rotary_emb(torch.zeros(1, 1, 32), torch.tensor([positions]))
    return cos[0]


@pytest.mark.parametrize("parameters", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("max_model_len", [64, 1000])
def test_pinned(parameters: dict[str, Any], max_model_len: int) -> None:
    """All positions are turned as transformers would in a sequence of `max_model_len`, whatever their company."""
    model, untouched = tiny_model(config(parameters)), tiny_model(config(parameters))
    pin_rope(model, max_model_len)
    expected = cosines(untouched, list(range(max_model_len)))
    assert torch.equal(cosines(model, [0, 5, 40]), expected[[0, 5, 40]])
    assert torch.equal(cosines(model, [5, max_model_len - 1, 2]), expected[[5, max_model_len - 1, 2]])
    assert torch.equal(cosines(model, [0, 5, 40]), expected[[0, 5, 40]])


def test_transformers_would_not_have() -> None:
    """The reason for `pin_rope`: if this fails, it may have become needless."""
    model = tiny_model(config(LONGROPE))
    assert not torch.equal(cosines(model, [5, 6])[0], cosines(model, [5, 200])[0])


def test_pinned_by_layer_type() -> None:
    nested = {"sliding_attention": THETA | {"rope_type": "default"}, "full_attention": dict(LONGROPE)}
    model = tiny_model(tiny_config("gemma3_text", rope_parameters=nested))
    pin_rope(model, 256)
    rotary = model.model.rotary_emb
    alone, _ = rotary(torch.zeros(1, 1, 32), torch.tensor([[5]]), "full_attention")
    among, _ = rotary(torch.zeros(1, 1, 32), torch.tensor([[5, 255]]), "full_attention")
    assert torch.equal(alone[0, 0], among[0, 0])
    assert torch.allclose(
        rotary.full_attention_inv_freq, 1 / (torch.tensor([2.0, 3, 4, 5]) * 10000 ** (torch.arange(4) / 4))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_holds_what_the_embedding_gives(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = tiny_model(config(LONGROPE)).model.rotary_emb
    cos, sin = tabulate(rotary, 64, dtype) or pytest.fail("none")
    positions = torch.tensor([[63, 0, 17, 17]])
    for table, given in zip((cos, sin), rotary(torch.empty(1, 4, 32, dtype=dtype), positions), strict=True):
        assert torch.equal(table[positions[0]], given[0])
    monkeypatch.setattr("engine.model.rope.MAX_TABLE_BYTES", cos.nbytes + sin.nbytes)
    assert tabulate(rotary, 64, dtype) is not None
    assert tabulate(rotary, 65, dtype) is None
