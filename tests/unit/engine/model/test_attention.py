"""What the attention function reads from transformers' calls, what it refuses, and that it is handed nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine.kernels import AttentionOptions, reference
from engine.kv.storage import KVCapacity, KVStorage, LayerSpec
from engine.model.attention import (
    ATTENTION_NAME,
    PagedInputs,
    Unsupported,
    attention_options,
    layer_index,
    paged_attention_forward,
    register,
)
from engine.model.batch import pack_step
from engine.plan import PlanRow, StepPlan

QUERY = torch.randn(1, 4, 3, 16)


class Layer(nn.Module):
    def __init__(self, layer_idx: Any = 0, is_causal: bool = True) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.is_causal = is_causal


def options(module: nn.Module | None = None, scaling: float | None = 0.1, **kwargs: Any) -> AttentionOptions:
    return attention_options(module or Layer(), QUERY, None, scaling, kwargs)


def test_options_of_a_layer() -> None:
    sinks = torch.zeros(4)
    got = options(sliding_window=7, softcap=30.0, s_aux=sinks, dropout=0.0, position_ids=torch.zeros(1, 3))
    assert (got.scale, got.window, got.softcap) == (0.1, 7, 30.0)
    assert got.sinks is sinks


def test_options_left_out() -> None:
    assert options(scaling=None) == AttentionOptions(scale=0.25)
    assert options(sliding_window=None, softcap=None, s_aux=None, block_indices=None) == AttentionOptions(scale=0.1)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "takes position_bias"),
        ({"indices": torch.zeros(1), "block_indices": torch.zeros(1)}, "takes block_indices, indices"),
        ({"is_causal": False}, "not causal"),
        ({"module": Layer(is_causal=False)}, "not causal"),
    ],
)
def test_refused(kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        options(**kwargs)


def test_a_call_may_overrule_its_module() -> None:
    assert options(Layer(is_causal=False), is_causal=True) == AttentionOptions(scale=0.1)


def test_masks_are_refused() -> None:
    with pytest.raises(Unsupported, match="masks of its own"):
        attention_options(Layer(), QUERY, torch.zeros(1, 1, 3, 3), 0.1, {})


def test_the_metadata_must_arrive() -> None:
    key = torch.randn(1, 2, 3, 16)
    with pytest.raises(Unsupported, match="do not pass keyword arguments"):
        paged_attention_forward(Layer(), QUERY, key, key, None, 0.1)


@pytest.mark.parametrize("index", [None, "0"])
def test_a_layer_must_know_its_place(index: object) -> None:
    with pytest.raises(Unsupported, match="do not know their layer"):
        layer_index(Layer(index))


def test_each_layer_writes_to_its_own_cache() -> None:
    """Two chunks of one sequence in layer 1 give what plain attention gives; layer 0 is not touched."""
    capacity = KVCapacity(num_blocks=4, block_size=2)
    device = torch.device("cpu")
    specs = [LayerSpec(2, key_dim=16, value_dim=16)] * 2
    storage = KVStorage.allocate(specs, capacity, torch.float32, device, reference.empty_cache)
    for tensor in (*storage.keys, *storage.values):
        tensor.zero_()
    query, key, value = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    outputs = []
    for start, stop in ((0, 3), (3, 5)):
        step = pack_step(StepPlan((PlanRow(0, [0] * (stop - start), start, [3, 0, 2], None),)), block_size=2)
        plan = reference.plan_attention(step.rows, {None}, device)
        inputs = PagedInputs(torch.from_numpy(step.slots), plan, storage, reference)
        part = slice(start, stop)
        output, _ = paged_attention_forward(
            Layer(1), query[:, :, part], key[:, :, part], value[:, :, part], None, 0.25, inputs
        )
        outputs.append(output)
    expected = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=0.25
    )
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected.transpose(1, 2))
    assert not storage.keys[0].any()
    assert torch.equal(storage.keys[1][3], key[0, :, :2].transpose(0, 1))


def test_registering_makes_no_masks() -> None:
    """transformers makes a mask for each attention function that has a mask function; ours must not get one."""
    from transformers import AttentionInterface, AttentionMaskInterface

    register()
    assert ATTENTION_NAME in AttentionInterface().valid_keys()
    assert ATTENTION_NAME not in AttentionMaskInterface().valid_keys()
