"""Unpacking GGUF files: the same weights, the tokenizer that the model was trained with, nothing made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from engine.errors import ModelError
from engine.model.gguf import convert_gguf
from tests.unit.engine.model.gguf_files import HEADS, HIDDEN, TEMPLATE, vocabulary, write_gguf


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "unpacked"
    directory.mkdir()
    return directory


def test_the_whole_model_comes_over(tmp_path: Path, target: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", target)

    weights = load_file(target / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}  # as the file has it
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        assert np.array_equal(weights[ours].numpy(), tensors[theirs]), ours
    # llama.cpp turns pairs of rotary channels in another order: its rows are ours, interleaved.
    query = tensors["blk.0.attn_q.weight"].reshape(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN).swapaxes(1, 2)
    assert np.array_equal(weights["model.layers.0.self_attn.q_proj.weight"].numpy(), query.reshape(HIDDEN, HIDDEN))
    assert "lm_head.weight" not in weights  # tied to the embedding

    config = AutoConfig.from_pretrained(target)
    assert config.tie_word_embeddings
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.max_position_embeddings == 128
    assert not hasattr(config, "quantization_config")
    assert GenerationConfig.from_pretrained(target).eos_token_id == 2
    assert AutoModelForCausalLM.from_pretrained(target).get_output_embeddings().weight.shape[0] == len(vocabulary())


def test_the_tokenizer_splits_digits_as_the_model_learned_them(tmp_path: Path, target: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre="smollm")
    convert_gguf(tmp_path / "tiny.gguf", target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = "ab 12<|im_end|>é"
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "Ġ", "1", "2", "<|im_end|>", "Ã", "©"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == TEMPLATE


def test_other_vocabularies_keep_their_own_split(tmp_path: Path, target: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre="gpt-2")
    convert_gguf(tmp_path / "tiny.gguf", target)
    assert AutoTokenizer.from_pretrained(target).tokenize("ab 12") == ["ab", "Ġ", "12"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(GGMLQuantizationType.F16, torch.float16), (GGMLQuantizationType.Q8_0, torch.bfloat16)],
)
def test_stored_in_the_type_that_loses_nothing_that_matters(
    tmp_path: Path, target: Path, kind: GGMLQuantizationType, dtype: torch.dtype
) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    convert_gguf(tmp_path / "tiny.gguf", target)
    weights = load_file(target / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {dtype}
    weight = weights["model.layers.0.self_attn.v_proj.weight"].float().numpy()
    assert np.abs(weight - tensors["blk.0.attn_v.weight"]).max() < 0.002  # weights are ~0.05, 8-bit steps ~0.001


def test_progress_goes_up_and_nothing_is_written_to_the_terminal(
    tmp_path: Path, target: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    told: list[tuple[str, float | None]] = []
    convert_gguf(tmp_path / "tiny.gguf", target, lambda stage, done=None: told.append((stage, done)))
    assert list(dict.fromkeys(stage for stage, _ in told)) == [
        "reading tiny.gguf",
        "unpacking tiny.gguf",
        "writing the unpacked weights",
    ]
    shares = [done for _, done in told if done is not None]
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert capfd.readouterr() == ("", "")


def test_a_missing_weight_is_an_error_not_a_random_number(tmp_path: Path, target: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", without={"blk.1.ffn_up.weight"})
    with pytest.raises(ModelError, match=r"lacks 1 of the model's weights, model.layers.1.mlp.up_proj.weight for one"):
        convert_gguf(tmp_path / "tiny.gguf", target)


@pytest.mark.parametrize("damage", ["cut", "garbage", "foreign"])
def test_a_file_that_cannot_be_read(tmp_path: Path, target: Path, damage: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture="nosuchmodel" if damage == "foreign" else "llama")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "garbage":
        path.write_bytes(b"GGUF" + bytes(range(256)))
    with pytest.raises(ModelError, match=r"cannot convert|no sound GGUF file") as caught:
        convert_gguf(path, target)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
