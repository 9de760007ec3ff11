"""A tiny Llama as a GGUF file, as llama.cpp's converter would write it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 2, 1, 128, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary (GPT-2's)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    spelling = {byte: chr(byte) for byte in visible} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [spelling[byte] for byte in range(256)]


def vocabulary() -> list[str]:
    """Special tokens, bytes, and two merged tokens: one of letters, one of digits."""
    return [*SPECIAL, *byte_alphabet(), "ab", "12"]


def write_gguf(
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "smollm",
    architecture: str = "llama",
    without: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Write the file; its matrices are stored as `kind`. Returns the tensors that went in, by GGUF name."""
    tensors = {name: tensor for name, tensor in _tensors().items() if name not in without}
    writer = GGUFWriter(path, architecture)
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    tokens = vocabulary()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, 0.05, (rows, columns)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(len(vocabulary()), HIDDEN)}
    kv_width = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv_width, HIDDEN),
            "attn_v": (kv_width, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        tensors |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{norm}.weight"] = random.normal(1, 0.1, HIDDEN).astype(np.float32)
    tensors["output_norm.weight"] = random.normal(1, 0.1, HIDDEN).astype(np.float32)
    return tensors
