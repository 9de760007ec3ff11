"""Models that the paged attention would get wrong are refused at load, with the reason and what would work."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from config.schema import ModelConfig
from engine.errors import ModelError
from engine.model.families import check_config
from engine.model.loader import load_model
from tests.factories_models import REFUSED, save_tiny_model, tiny_config


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused(model_type: str, tmp_path: Path) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    overrides, reason = REFUSED[model_type]
    config = tiny_config(model_type, **overrides)
    try:
        check_config(config)
    except ModelError:
        config.save_pretrained(tmp_path)  # refused before any weights are looked for: none are needed
    else:
        save_tiny_model(tmp_path, config)
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(tmp_path, ModelConfig(device="cpu", dtype="float32", kernels="reference", num_threads=1))
    assert str(caught.value).startswith(f"this {model_type} model cannot be served: ")
    assert "llama" in str(caught.value.hint)
