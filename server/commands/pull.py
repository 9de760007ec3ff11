"""`chairlift pull`: make a model ready to serve, now."""

from __future__ import annotations

from dataclasses import replace

from cyclopts import App

from config.load import Loaded, SettingsLoader
from server.terminal import fail, show_progress, warn


def register(app: App, loader: SettingsLoader) -> None:
    """Add the command."""
    app.command(loader.command(pull, only={"model", "revision", "cache_dir"}))


def pull(loaded: Loaded, name: str | None = None, /) -> int:
    """Download a model and unpack it, so that `chairlift serve` starts at once. Does nothing for one that is there.

    Parameters
    ----------
    name
        The model; by default what the settings say.
    """
    from engine.errors import ModelError
    from engine.model.resolve import resolve_model

    warn(loaded.warnings)
    model = loaded.settings.engine.model
    if name is not None:
        model = replace(model, model=name)
    try:
        with show_progress() as progress:
            path = resolve_model(model.model, revision=model.revision, cache_dir=model.cache_dir, progress=progress)
    except ModelError as error:
        fail(str(error), hint=error.hint)
    print(path)
    return 0
