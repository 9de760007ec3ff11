"""`chairlift version`."""

from __future__ import annotations

from cyclopts import App

from config.load import SettingsLoader
from server import __version__


def register(app: App, loader: SettingsLoader) -> None:
    """Add the command."""
    app.command(version)


def version() -> int:
    """Print the version."""
    print(__version__)
    return 0
