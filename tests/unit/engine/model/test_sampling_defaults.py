"""What generation_config.json says of sampling, and what it may not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.model.sampling_defaults import FILE, sampling_defaults


def write(directory: Path, config: Any) -> Path:
    (directory / FILE).write_text(json.dumps(config))
    return directory


def test_what_chooses_tokens_is_taken_and_nothing_else(tmp_path: Path) -> None:
    config = {
        "do_sample": False,
        "eos_token_id": [1, 2],
        "max_new_tokens": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_k": 20.0,
        "top_p": 0.8,
        "typical_p": 0.5,
    }
    found = sampling_defaults(write(tmp_path, config))
    assert found == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    assert type(found["top_k"]) is int


@pytest.mark.parametrize("config", [{}, {"temperature": None}, [], {"transformers_version": "5.0"}], ids=str)
def test_what_says_nothing(tmp_path: Path, config: Any) -> None:
    assert sampling_defaults(write(tmp_path, config)) == {}


def test_no_file(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", 1.5),
        ("top_k", float("inf")),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", [1]),
    ],
)
def test_a_default_that_no_request_may_have_is_an_error_with_the_way_out(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name) as caught:
        sampling_defaults(write(tmp_path, {name: value}))
    assert caught.value.setting == "generation_config"
    assert "--generation-config none" in str(caught.value.hint)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        sampling_defaults(tmp_path)
