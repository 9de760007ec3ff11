"""Tiny models with random weights, of every family that the engine serves, and what a small config of each takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

WINDOW = 8
"""Sliding window of the tiny models: shorter than every prompt but a few."""

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # mixtures of experts
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
"""Sizes, by the names that config classes have for them; each class takes those it knows."""

ALTERNATING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}
ALL_SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
LATENT: dict[str, Any] = {"num_key_value_heads": 4}
SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": ALTERNATING,
    "apertus": {},
    "arcee": {},
    "axk1": LATENT,
    "biogpt": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": ALTERNATING,
    "cohere2_moe": ALTERNATING,
    "cwm": ALTERNATING | {"bos_token_id": 1},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": ALTERNATING,
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": ALTERNATING,
    "exaone_moe": ALTERNATING,
    "flex_olmo": {},
    "gemma": {},
    "gemma2": ALTERNATING | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": ALTERNATING | {"query_pre_attn_scalar": 8},
    "gemma3n_text": SHARED_KV | {"intermediate_size": 64, "laurel_rank": 8, "activation_sparsity_pattern": None},
    "gemma4_text": SHARED_KV | {"global_head_dim": 16},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": LATENT,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": ALTERNATING,
    "granite": {},
    "granite_swa": ALTERNATING,
    "granitemoe": {},
    "granitemoe_swa": ALTERNATING,
    "granitemoehybrid": {"layer_types": ["attention"] * 2, "mamba_n_heads": 4},
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "jais2": {},
    "jetmoe": {},
    "llama": {},
    "longcat_flash": LATENT | {"num_layers": 1},
    "mimo_v2_flash": ALTERNATING,
    "minicpm3": LATENT,
    "minimax_m2": {},
    "ministral": ALTERNATING,
    "ministral3": ALL_SLIDING,
    "mistral": ALL_SLIDING,
    "mixtral": ALL_SLIDING,
    "nanochat": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "olmoe": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": ALL_SLIDING,
    "phimoe": {"sliding_window": 256},
    "qwen2": ALTERNATING | {"use_sliding_window": True},
    "qwen2_moe": {},  # its layers do not say that they slide, when they do: refused then
    "qwen3": ALTERNATING | {"use_sliding_window": True},
    "qwen3_moe": ALL_SLIDING | {"use_sliding_window": True},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "solar_open": {},
    "starcoder2": ALL_SLIDING,
    "vaultgemma": ALTERNATING,
    "youtu": LATENT,
}
"""`model_type` -> what its config takes beside SMALL."""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": ({"mamba_n_heads": 4, "mamba_d_head": 16}, "layers of type"),
    "bart": ({}, "encoder-decoder"),
    "bert": ({}, "not causal"),
    "bloom": ({}, "cannot be replaced"),  # ALiBi
    "deepseek_v32": (LATENT, "layers of type"),
    "diffllama": ({}, "not each of its 2 layers attends exactly once"),
    "doge": ({}, "attention masks of its own"),
    "falcon": ({"alibi": True}, "cannot be replaced"),
    "falcon_mamba": ({}, "layers of type"),
    "gpt_neo": ({"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "cannot be replaced"),
    "jamba": ({}, "layers of type"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "llama4_text": ({}, "layers of type chunked_attention"),
    "mamba": ({}, "layers of type"),
    "mamba2": ({"num_heads": 8, "head_dim": 8}, "layers of type"),
    "minimax": ({}, "layers of type linear_attention"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "cannot be replaced"),
    "nemotron": ({}, "do not pass keyword arguments"),
    "nemotron_h": ({}, "layers of type"),
    "qwen2_moe": (ALTERNATING | {"use_sliding_window": True}, "logits"),  # masks slide, layers do not say so
    "qwen3_5_text": ({}, "layers of type linear_attention"),
    "qwen3_next": ({}, "layers of type linear_attention"),
    "recurrent_gemma": ({"max_position_embeddings": 256}, "layers of type|cannot be replaced"),
    "rwkv": ({"attention_hidden_size": 32}, "cannot be replaced"),
    "stablelm": ({}, "do not pass keyword arguments"),
    "t5": ({}, "encoder-decoder"),
    "zamba2": ({"layer_types": ["linear_attention", "hybrid"]}, "layers of type"),
}
"""`model_type` -> what its config takes beside SMALL, and (part of) the reason why it is refused."""


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A small config of this family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    sizes = {name: value for name, value in SMALL.items() if name in known}
    return config_class(**(sizes | FAMILIES.get(model_type, {}) | overrides))


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A model of this config, in float32, its weights so far apart that no two tokens come near a tie."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases: around what they are
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            else:
                parameter.copy_(0.25 * torch.randn_like(parameter))
    return model


def save_tiny_model(directory: Path, config: Any, seed: int = 0) -> Path:
    """Write such a model as a directory that `load_model` reads."""
    tiny_model(config, seed).save_pretrained(directory)
    return directory
