"""Which models the engine serves: the families that the tests prove, and what rules a model out before it is loaded."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError

_SUPPORTED = """
    afmoe apertus arcee axk1 biogpt bitnet cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 dots1 ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe
    glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jais2 jetmoe llama longcat_flash mimo_v2_flash
    minicpm3 minimax_m2 ministral ministral3 mistral mixtral nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""
SUPPORTED: tuple[str, ...] = tuple(_SUPPORTED.split())
"""`model_type`s whose greedy output equals transformers' `generate()`, token for token (`tests/integration`)."""

ATTENDING_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""Values of a config's `layer_types` that the paged attention computes."""

FIXED_ATTENTION = "its attention cannot be replaced"


def refusal(model_type: str, reason: str) -> ModelError:
    """The error for a model that cannot be served. `reason` is a clause about `it`."""
    return ModelError(
        f"this {model_type} model cannot be served: {reason}",
        setting="model",
        hint=f"families that are known to work: {', '.join(SUPPORTED)}",
    )


def check_config(config: Any) -> None:
    """Refuse what the config alone rules out, before gigabytes are read. `config` is a transformers config.

    Raises ModelError.
    """
    from transformers import AutoModelForCausalLM

    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise refusal(config.model_type, "it is an encoder-decoder")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise refusal(config.model_type, "it is no causal language model")
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if not model_class._can_set_attn_implementation():
        raise refusal(config.model_type, FIXED_ATTENTION)
    strange = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - ATTENDING_LAYERS)
    if strange:
        raise refusal(config.model_type, f"it has layers of type {', '.join(strange)}")
