"""`chairlift config show`: every setting, its value, and where it came from."""

from __future__ import annotations

import json as json_format
from typing import Any

from cyclopts import App

from config.describe import Setting, describe
from config.load import Loaded, SettingsLoader
from engine.machine import format_bytes
from server.terminal import print_table, warn


def register(app: App, loader: SettingsLoader) -> None:
    """Add the command."""
    config = App(name="config", help="What the settings are.")
    config.command(loader.command(show), name="show")
    app.command(config)


def show(loaded: Loaded, *, json: bool = False) -> int:
    """Show each setting's value and where it came from. Secrets are hidden.

    Takes the flags of `chairlift serve`, so that a command line can be looked at before it is run.

    Parameters
    ----------
    json
        Print JSON for programs.
    """
    warn(loaded.warnings)
    if json:
        rows = {
            setting.name: {"value": _shown(setting, loaded), "origin": loaded.origins[setting.name]}
            for setting in describe()
        }
        print(json_format.dumps(rows, indent=2))
    else:
        _print_table(loaded)
    return 0


def _print_table(loaded: Loaded) -> None:
    from rich.table import Table

    table = Table("setting", "value", "origin", box=None, pad_edge=False, header_style="bold")
    section = None
    for setting in describe():
        if section not in (None, setting.section):
            table.add_row()
        section = setting.section
        origin = loaded.origins[setting.name]
        style = "dim" if origin == "default" else ""
        table.add_row(setting.name, _text(setting, _shown(setting, loaded)), origin, style=style)
    print_table(table)


def _shown(setting: Setting, loaded: Loaded) -> Any:
    value = loaded.values[setting.name]
    if setting.secret:
        return f"({len(value)} hidden)" if value else None
    return value


def _text(setting: Setting, value: Any) -> str:
    if value is None:
        return "-"
    if setting.kind == "bytes":
        return f"{value} ({format_bytes(value)})"
    return str(value).lower() if isinstance(value, bool) else str(value)
