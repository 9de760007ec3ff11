import pytest

from config.schema import CacheConfig, EngineConfig, ModelConfig
from engine.build import build_engine
from engine.errors import ConfigError


def test_a_kv_cache_larger_than_the_machine_is_refused_before_the_model_is_looked_for() -> None:
    config = EngineConfig(
        model=ModelConfig(model="no/such-model", device="cpu"), cache=CacheConfig(kv_cache_memory=1 << 50)
    )
    with pytest.raises(ConfigError, match=r"1024\.0 TiB; .* of memory are free on cpu") as caught:
        build_engine(config)
    assert caught.value.setting == "kv_cache_memory"
