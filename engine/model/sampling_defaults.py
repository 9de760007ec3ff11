"""How a model's makers would have it sampled: what generation_config.json says, for requests that say nothing.

    {"do_sample": true, "temperature": 0.6, "top_k": 20, ...} -> {"temperature": 0.6, "top_k": 20}

Of its fields, those that a request has too and that choose tokens, as vLLM takes them. `do_sample` is none: a request
without a temperature samples, whatever that says. Files without any of these (every GGUF file) change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError, RequestError
from engine.params import SamplingParams

FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(directory: Path) -> Mapping[str, float]:
    """Field of SamplingParams -> its default with this model. Raises ModelError for values that no request may have."""
    path = directory / FILE
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", setting="model") from error
    found = {name: config[name] for name in _NAMES if config.get(name) is not None} if isinstance(config, dict) else {}
    for name, value in found.items():
        _check(path, name, value)
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    return found


def _check(path: Path, name: str, value: Any) -> None:
    is_number = type(value) in (int, float) and (name != "top_k" or float(value).is_integer())
    problem = None if is_number else f"{name} is {value!r}"
    try:
        if is_number:
            SamplingParams(**{name: value})
    except RequestError as error:
        problem = str(error)
    if problem is not None:
        hint = "mend the file, or leave it with --generation-config none"
        raise ModelError(f"{path} has no usable default: {problem}", setting="generation_config", hint=hint)
