"""The settings as arguments of a cyclopts command: flags, help, and conversion."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter, Token

from config.describe import Setting, describe, section_title
from config.toml import PRESET_DIR, read_toml
from config.values import parse


def setting_parameter(setting: Setting) -> inspect.Parameter:
    """A setting as a keyword argument of a command function."""

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        parsed = tuple(parse(token.value, hint, setting.rules) for token in tokens)
        return parsed if many else parsed[0]

    many = setting.kind == "texts"
    hint = str if many else setting.base_hint
    title, description = section_title(setting.section)
    options = Parameter(
        name=setting.flag,
        group=Group(title, help=description, sort_key=_group_order(setting)),
        help=setting.doc.replace("`", ""),
        converter=convert,
        allow_repeating=True,  # the last one counts: scripts add flags to a given command line
        show=not setting.hidden,
        negative=None if setting.base_hint is bool else (),
        show_default=_default_text(setting),
        metavar={"bytes": "BYTES", "number": "N", "text": "TEXT", "texts": "TEXT"}.get(setting.kind),
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=setting.default,
        annotation=Annotated[setting.hint, options],
    )


def config_parameter() -> inspect.Parameter:
    """`--config`, which names the settings file."""
    options = Parameter(
        name="--config",
        group=Group("Settings file", sort_key=0),
        help="TOML file with any of the settings below: max_num_seqs = 64. Environment and flags go before it.",
        metavar="FILE",
    )
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, options]
    )


def _group_order(setting: Setting) -> int:
    return 1 + list(dict.fromkeys(other.section for other in describe())).index(setting.section)


def _default_text(setting: Setting) -> Callable[[Any], Any] | bool:
    """What help says for the default: that of each preset, where the presets set it."""
    presets = {path.stem: read_toml(path) for path in sorted(PRESET_DIR.glob("*.toml"))}
    told = ", ".join(f"{values[setting.name]} on {name}" for name, values in presets.items() if setting.name in values)
    if told:
        return lambda _: told
    if isinstance(setting.default, bool):
        return lambda value: "on" if value else "off"
    return setting.default not in (None, ())
