"""TOML files with settings: the user's, and the presets."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

PRESET_DIR = Path(__file__).parent / "presets"
"""`cpu.toml` and `cuda.toml`: the defaults that depend on the device."""


class SettingsError(ValueError):
    """A setting cannot be used: one line that names it as the user wrote it, and says what would be right."""


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a TOML file. Raises SettingsError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
