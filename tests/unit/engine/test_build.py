from pathlib import Path
from typing import Literal

import pytest

from config.schema import CacheConfig, EngineConfig, ModelConfig
from engine.build import build_engine
from engine.errors import ConfigError
from tests.chaos.model import save_served_model


def test_a_kv_cache_larger_than_the_machine_is_refused_before_the_model_is_looked_for() -> None:
    config = EngineConfig(
        model=ModelConfig(model="no/such-model", device="cpu"), cache=CacheConfig(kv_cache_memory=1 << 50)
    )
    with pytest.raises(ConfigError, match=r"1024\.0 TiB; .* of memory are free on cpu") as caught:
        build_engine(config)
    assert caught.value.setting == "kv_cache_memory"


@pytest.mark.parametrize(("setting", "defaults"), [("auto", {"temperature": 0.5, "top_k": 7}), ("none", {})])
def test_the_models_own_sampling_defaults(
    tmp_path: Path, setting: Literal["auto", "none"], defaults: dict[str, float]
) -> None:
    directory = save_served_model(tmp_path / "model")
    (directory / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5, "top_k": 7}')
    core, _ = build_engine(
        EngineConfig(
            model=ModelConfig(model=str(directory), device="cpu", generation_config=setting),
            cache=CacheConfig(kv_cache_tokens=1024),
        )
    )
    assert core.info.sampling_defaults == defaults
