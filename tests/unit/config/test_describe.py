"""The table of settings that help, README and the loader share."""

from __future__ import annotations

import re
from dataclasses import fields

from config.describe import assemble, describe, section_title
from config.schema import (
    AccessConfig,
    CacheConfig,
    EngineConfig,
    FaultConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    Settings,
)
from config.toml import PRESET_DIR, read_toml

BY_NAME = {setting.name: setting for setting in describe()}


def test_every_field_is_a_setting_in_the_order_of_the_schema() -> None:
    sections = (ModelConfig, CacheConfig, SchedulerConfig, FaultConfig, ServerConfig, AccessConfig)
    assert [setting.name for setting in describe()] == [field.name for class_ in sections for field in fields(class_)]


def test_names_are_flat_so_no_two_sections_may_share_one() -> None:
    assert len(BY_NAME) == len(describe())


def test_every_setting_says_in_whole_sentences_what_it_is() -> None:
    for setting in describe():
        assert re.fullmatch(r"[A-Z`].*\.", setting.doc, re.DOTALL), setting.name
        title, description = section_title(setting.section)
        assert title
        assert description.endswith(".")


def test_one_setting_in_full() -> None:
    setting = BY_NAME["max_num_seqs"]
    assert setting.flag == "--max-num-seqs"
    assert setting.env == "CHAIRLIFT_MAX_NUM_SEQS"
    assert setting.group == "Scheduler"
    assert setting.kind == "number"
    assert setting.default == 64
    assert setting.doc == "Most requests that run at once."
    assert not setting.secret


def test_kinds() -> None:
    kinds = {
        name: BY_NAME[name].kind for name in ("kv_cache_memory", "prefix_caching", "model", "api_key", "log_level")
    }
    assert kinds == {
        "kv_cache_memory": "bytes",
        "prefix_caching": "on or off",
        "model": "text",
        "api_key": "texts",
        "log_level": "debug|info|warning|error",
    }
    assert BY_NAME["api_key"].secret


def test_defaults_keep_their_own_rules() -> None:
    for setting in describe():
        if isinstance(setting.default, int) and "at_least" in setting.rules:
            assert setting.rules["at_least"] <= setting.default <= setting.rules.get("at_most", setting.default)
        if "pattern" in setting.rules and setting.default is not None:
            assert re.fullmatch(setting.rules["pattern"], setting.default)


def test_assemble() -> None:
    assert assemble({}) == Settings()
    expected = Settings(engine=EngineConfig(model=ModelConfig(model="x")), server=ServerConfig(port=1))
    assert assemble({"model": "x", "port": 1}) == expected


def test_presets_hold_settings_that_exist() -> None:
    presets = {path.stem: read_toml(path) for path in PRESET_DIR.glob("*.toml")}
    assert set(presets) == {"cpu", "cuda"}
    assert presets["cpu"].keys() == presets["cuda"].keys() <= BY_NAME.keys()
    # Offline use has no presets: there the schema's own defaults count, and they are those for a CPU.
    assert all(BY_NAME[name].default == value for name, value in presets["cpu"].items())
