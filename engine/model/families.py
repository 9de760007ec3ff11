"""Which models the engine serves: the families that the tests prove, and what rules a model out before it is loaded."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError

SUPPORTED: tuple[str, ...] = ()
"""`model_type`s whose greedy output equals transformers' `generate()`, token for token (`tests/integration`)."""

ATTENDING_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""Values of a config's `layer_types` that the paged attention computes."""


def refusal(model_type: str, reason: str) -> ModelError:
    """The error for a model that cannot be served. `reason` follows `since`."""
    return ModelError(
        f"{model_type} models cannot be served, since {reason}",
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
        raise refusal(config.model_type, "they are encoder-decoders")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise refusal(config.model_type, "they are no causal language models")
    strange = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - ATTENDING_LAYERS)
    if strange:
        raise refusal(config.model_type, f"they have layers of type {', '.join(strange)}")
