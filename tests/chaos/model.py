"""A tiny random model with a tokenizer and a chat template, as a directory that `chairlift serve --model` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.factories_models import save_tiny_model, tiny_config
from tests.factories_text import hf_byte_level


def save_served_model(directory: Path, **tokenizer_settings: Any) -> Path:
    """Write it. A step takes a millisecond, so that what is seen is the server and not the model."""
    tokenizer = hf_byte_level(**tokenizer_settings)
    config = tiny_config("llama", vocab_size=len(tokenizer), max_position_embeddings=1024, eos_token_id=0)
    save_tiny_model(directory, config)
    tokenizer.save_pretrained(directory)
    return directory
