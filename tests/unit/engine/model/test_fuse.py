"""Fusing: what is replaced, that nothing changes but rounding, and that what differs stays as it is."""

from __future__ import annotations

import dataclasses
import logging
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from config.schema import ModelConfig
from engine.errors import ConfigError, ModelError
from engine.kernels.cpu.back_end import CpuKernels
from engine.kv.storage import KVCapacity, KVStorage, LayerSpec
from engine.model import attention, fuse, rope
from engine.model.batch import pack_step
from engine.model.direct import DirectForward
from engine.model.forward import make_forward
from engine.model.fused import FusedPass
from engine.model.loader import load_model
from engine.params import SamplingParams
from engine.plan import PlanRow, StepPlan
from tests.cpu_kernels import build_kernels
from tests.factories_models import save_tiny_model, tiny_config, tiny_model

LENGTHS = (30, 1, 17)

LIKE_LLAMA = {
    "ernie4_5": "neighbouring dims rotated",
    "gemma2": "norms after attention and MLP, soft-cap, windows, 1 + weight in norms",
    "glm": "neighbouring dims rotated, only some of them, gate and up joined",
    "granite": "factors on what is added",
    "llama": "plain",
    "mistral": "windows",
    "phi3": "projections joined",
    "qwen2": "biases",
    "qwen3": "norms of query and key heads",
    "smollm3": "a layer that is not rotated",
}


@pytest.fixture(autouse=True)
def _built() -> None:
    build_kernels()


def paged_model(model_type: str, **overrides: Any) -> Any:
    attention.register()
    model = tiny_model(tiny_config(model_type, **overrides))
    model.set_attn_implementation(attention.ATTENTION_NAME)
    return model.requires_grad_(False)


def specs_of(model: Any) -> list[LayerSpec]:
    config = model.config
    num_kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return [LayerSpec(num_kv_heads, key_dim=8, value_dim=8)] * config.num_hidden_layers


def fuse_it(model: Any, **options: Any) -> None:
    fuse.fuse_model(model, CpuKernels(model.dtype, 16), specs_of(model), max_model_len=256, **options)


def logits_of(model: Any, dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None) -> Tensor:
    """Of three rows in one step, one of which continues a context of the first's blocks."""
    kind = cache_dtype or dtype
    kernels = CpuKernels(dtype, 16)
    capacity = KVCapacity(num_blocks=8, block_size=16)
    storage = KVStorage.allocate(specs_of(model), capacity, kind, torch.device("cpu"), kernels.empty_cache)
    whole = (torch.empty(0, dtype=dtype).set_(t.untyped_storage()) for t in (*storage.keys, *storage.values))
    for tensor in whole:
        tensor.fill_(0.5)
    rows = tuple(
        PlanRow(i, list(range(3, 3 + length)), start, (2 * i, 2 * i + 1), SamplingParams())
        for i, (length, start) in enumerate(zip(LENGTHS, (0, 20, 5), strict=True))
    )
    step = pack_step(StepPlan(rows), 16)
    forward = make_forward(model, kernels, {None}, torch.device("cpu"))
    return forward(step, storage).clone()


def kinds(model: Any) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules())


@pytest.mark.parametrize("model_type", LIKE_LLAMA)
def test_layers_like_llamas_are_one_call(model_type: str) -> None:
    model = paged_model(model_type)
    before = logits_of(model)
    fuse_it(model)
    found = kinds(model)
    assert found["FusedLayers"] == 1
    assert found["JoinedLayer"] == 0  # no step passes them
    assert found["FusedLinear"] == 1  # the output layer
    assert found["FusedNorm"] == 1  # the last norm
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)


ENDS_OF_THEIR_OWN = {
    "gemma2": "scales its embeddings, caps its logits",
    "granite": "scales its embeddings, divides its logits",
}


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", [each for each in LIKE_LLAMA if each not in ENDS_OF_THEIR_OWN])
def test_a_forward_pass_that_is_but_a_chain_is_one_call(model_type: str, is_tied: bool) -> None:
    model = paged_model(model_type, tie_word_embeddings=is_tied)
    fuse_it(model)
    assert isinstance(model.fused_pass, FusedPass)
    assert model.fused_pass.embedding is None
    at_once = logits_of(model)
    del model.fused_pass
    assert torch.equal(logits_of(model), at_once)
    del vars(model)["forward"]
    assert torch.equal(logits_of(model), at_once)


class ScaledEmbedding(nn.Embedding):
    """As some models have."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3


def test_an_embedding_of_the_models_own_is_called_before_the_rest() -> None:
    model = paged_model("llama")
    model.set_input_embeddings(ScaledEmbedding(*model.get_input_embeddings().weight.shape))
    before = logits_of(model)
    fuse_it(model)
    assert isinstance(model.fused_pass.embedding, ScaledEmbedding)
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ENDS_OF_THEIR_OWN)
def test_a_forward_pass_that_is_more_than_a_chain_stays(model_type: str) -> None:
    model = paged_model(model_type)
    fuse_it(model)
    assert "forward" not in vars(model)


def test_only_the_tokens_that_are_wanted_get_logits() -> None:
    """Of steps that grow, want none, or want more than one of a row's."""
    model = paged_model("llama", tie_word_embeddings=True)
    fuse_it(model)
    kernels = CpuKernels(torch.float32, 16)
    storage = KVStorage.allocate(
        specs_of(model), KVCapacity(8, 16), torch.float32, torch.device("cpu"), kernels.empty_cache
    )
    forward = make_forward(model, kernels, {None}, torch.device("cpu"))
    tokens = list(range(5, 45))
    for length in (3, 40, 21):
        step = pack_step(StepPlan((PlanRow(0, tokens[:length], 0, (3, 1, 4), None),)), 16)
        assert forward(step, storage).shape == (0, 128)
        wanted = [length - 1, 0, length // 2]
        all_of_them = step.with_all_logits()
        numbers = all_of_them.numbers[:-length] + array("q", wanted)
        some = forward(dataclasses.replace(step, numbers=numbers, num_logits=len(wanted)), storage).clone()
        assert torch.equal(some, forward(all_of_them, storage)[wanted])


def without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "MAX_TABLE_BYTES", 2 * 256 * 8 * 4 - 1)


def with_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of angles that depend on more than the position."""
    tabulate = rope.tabulate
    monkeypatch.setattr(fuse, "tabulate", lambda *args: tuple(each.flip(0) for each in tabulate(*args) or ()))


def without_position_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "tabulate", lambda *_: 1 / 0)


@pytest.mark.parametrize("spoil", [without_a_table, with_another_table, without_position_ids])
def test_where_angles_cannot_be_looked_up_the_chain_is_called_link_by_link(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None]
) -> None:
    spoil(monkeypatch)
    model = paged_model("llama")
    fuse_it(model)
    assert isinstance(vars(model)["forward"], DirectForward)
    assert not hasattr(model, "fused_pass")
    direct = logits_of(model)
    del vars(model)["forward"]
    assert torch.equal(logits_of(model), direct)


def test_a_forward_pass_that_does_more_than_its_parts_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes from part to part looks right, and yet the model adds to it."""
    model = paged_model("llama")
    monkeypatch.setattr(DirectForward, "__call__", lambda self, **_: SimpleNamespace(logits=torch.zeros(1, 29, 100)))
    before = logits_of(model)
    fuse_it(model)
    assert "forward" not in vars(model)
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)


class _Layers(nn.ModuleList):
    """Of which models take the first so many."""

    def __getitem__(self, index: Any) -> Any:
        return self.first(index.stop) if isinstance(index, slice) else super().__getitem__(index)

    def first(self, number: int) -> list[Any]:
        raise NotImplementedError


class _ByNumber(_Layers):
    """As in a model that takes its layers one by one."""

    def first(self, number: int) -> list[Any]:
        return [self[i] for i in range(number)]


class _Paired(_Layers):
    """As in a model that pairs its layers with something."""

    def first(self, number: int) -> list[Any]:
        return [layer for layer, _ in zip(self, range(number), strict=True)]


class _MadeUp(_Layers):
    """As in a model whose results depend on how many layers its list has."""

    def first(self, number: int) -> list[Any]:
        return [*self, *[lambda hidden, **_: 2 * hidden] * (number - len(self))]


@pytest.mark.parametrize("kind", [_ByNumber, _Paired, _MadeUp])
def test_layers_that_a_model_counts_on_stay_in_their_list(kind: type[nn.ModuleList]) -> None:
    model = paged_model("llama")
    model.model.layers = kind(list(model.model.layers))
    before = logits_of(model)
    fuse_it(model)
    assert kinds(model)["FusedLayers"] == 1
    assert kinds(model)["JoinedLayer"] == len(model.model.layers) - 1 > 0
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_layers_that_are_one_call_over_narrower_caches(model_type: str, cache_dtype: torch.dtype) -> None:
    """The same but for keys that, rounded otherwise before, become the neighbouring int8 or bfloat16."""
    model = paged_model(model_type)
    exact, before = logits_of(model), logits_of(model, cache_dtype=cache_dtype)
    fuse_it(model)
    assert kinds(model)["FusedLayers"] == 1
    after = logits_of(model, cache_dtype=cache_dtype)
    assert (after - before).norm() < 1e-3 * before.norm()
    assert not torch.equal(before, exact)


def test_layers_with_angles_of_their_own_are_not_joined() -> None:
    model = paged_model("gemma3_text", num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"])
    before = logits_of(model)
    fuse_it(model)
    assert kinds(model)["FusedLayers"] == 2
    assert kinds(model)["JoinedLayer"] == 1
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_oss", "mixtral", "olmo2", "cohere"])
def test_other_models_are_fused_in_parts(model_type: str) -> None:
    model = paged_model(model_type)
    before = logits_of(model)
    fuse_it(model)
    assert kinds(model)["FusedLayers"] == 0
    assert kinds(model)["FusedLinear"] > 0
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)


def test_weights_exist_once() -> None:
    """Nothing of the original is left but what is not a weight; a tied embedding is read from the output layer."""
    model = paged_model("llama", tie_word_embeddings=True)
    before = logits_of(model)
    fuse_it(model)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    assert kinds(model)["SharedEmbedding"] == 1
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_near_float32() -> None:
    exact = logits_of(paged_model("llama"))
    model = paged_model("llama").to(torch.bfloat16)
    rough = logits_of(model, torch.bfloat16).float()
    fuse_it(model)
    fused = logits_of(model, torch.bfloat16)
    assert fused.dtype == torch.float32
    assert (fused - exact).norm() < 1.2 * (rough - exact).norm()


def test_int8() -> None:
    model = paged_model("llama")
    before = logits_of(model)
    fuse_it(model, int8=True)
    decoder = next(module.decoder for module in model.modules() if isinstance(module, fuse.FusedLayers))
    assert decoder.layers[0].down.weight.dtype == torch.int8
    assert 1e-4 < (logits_of(model) - before).norm() / before.norm() < 0.1


def wrap_forward(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    original = module.forward
    module.forward = lambda *args, **kwargs: change(original(*args, **kwargs))  # type: ignore[method-assign]


def test_a_layer_that_computes_something_else_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = paged_model("llama", num_hidden_layers=3)
    wrap_forward(model.model.layers[1], lambda hidden: 1.01 * hidden)
    before = logits_of(model)
    with caplog.at_level(logging.WARNING):
        fuse_it(model)
    assert "model.layers.1 stays" in caplog.text
    assert kinds(model)["LlamaDecoderLayer"] == 1
    assert kinds(model)["FusedLayers"] == 2
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)


def test_what_depends_on_far_positions_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """As models do that sharpen the attention of tokens beyond the context that they were first trained for."""
    model = paged_model("llama")
    layer = model.model.layers[0]
    original = layer.forward

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        far = (kwargs["position_ids"] > 200)[..., None]
        return torch.where(far, 1.5, 1.0) * original(hidden_states, **kwargs)

    layer.forward = forward
    with caplog.at_level(logging.WARNING):
        fuse_it(model)
    assert "model.layers.0 stays" in caplog.text


def test_a_part_too_many_leaves_a_layer_alone() -> None:
    model = paged_model("llama")
    model.model.layers[0].self_attn.extra = nn.Identity()
    fuse_it(model)
    assert kinds(model)["LlamaDecoderLayer"] == 1


def test_a_model_that_comes_out_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = paged_model("llama")
    monkeypatch.setattr(fuse, "_is_same_layer", lambda *_, **__: True)
    wrap_forward(model.model.layers[0], lambda hidden: 1.5 * hidden)
    with pytest.raises(ModelError, match="come out wrong with fused modules"):
        fuse_it(model)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Logits bit for bit, alone and in company, in one chunk and in two."""
    model = paged_model("llama").to(torch.bfloat16)
    fuse_it(model)
    kernels = CpuKernels(torch.bfloat16, 16)

    def run(*steps: tuple[PlanRow, ...]) -> Tensor:
        storage = KVStorage.allocate(
            specs_of(model), KVCapacity(8, 16), torch.bfloat16, torch.device("cpu"), kernels.empty_cache
        )
        forward = make_forward(model, kernels, {None}, torch.device("cpu"))
        for step in steps:
            logits = forward(pack_step(StepPlan(step), 16), storage)[0].clone()
        return logits

    tokens = list(range(5, 45))
    mine = PlanRow(0, tokens, 0, (3, 1, 4), SamplingParams())
    other = PlanRow(1, tokens[:20], 0, (5, 2), SamplingParams())
    first, second = (
        PlanRow(0, tokens[:23], 0, (3, 1, 4), None),
        PlanRow(0, tokens[23:], 23, (3, 1, 4), SamplingParams()),
    )
    alone = run((mine,))
    assert torch.equal(run((mine, other)), alone)
    assert torch.equal(run((first, other), (second,)), alone)


def test_quantization_is_a_setting(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, tiny_config("llama"))
    config = ModelConfig(device="cpu", dtype="float32", kernels="cpu", quantization="int8", num_threads=1)
    layers = [module for module in load_model(path, config).model.modules() if isinstance(module, fuse.FusedLayers)]
    assert layers[0].decoder.layers[1].gate_up.weight.dtype == torch.int8
    for without in ({"kernels": "reference"}, {"fuse": False}):
        with pytest.raises(ConfigError, match="quantization int8 needs"):
            load_model(path, dataclasses.replace(config, **without))
