"""`chairlift explain`: see continuous batching at work."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from config.load import Loaded, SettingsLoader
from config.schema import EngineConfig, SchedulerConfig
from server.terminal import fail, show_progress, warn

SETTINGS = frozenset({"model", "revision", "cache_dir", "device", "num_threads", "kernels"})


def register(app: App, loader: SettingsLoader) -> None:
    """Add the command."""
    app.command(loader.command(explain, only=SETTINGS))


def explain(
    loaded: Loaded,
    *,
    slots: Annotated[int, Parameter(validator=Number(gte=1, lte=8))] = 3,
    token_budget: Annotated[int, Parameter(validator=Number(gte=2, lte=64))] = 16,
    prompts_file: Path | None = None,
    save: Path | None = None,
    color: bool = True,
) -> int:
    """Run a few prompts by static and by continuous batching, and show what each computes, step by step.

    Takes a minute or two on two cores. The model computes in float32, so that both ways must give the same tokens; the
    exit status is 1 if they do not.

    Parameters
    ----------
    slots
        Most requests that run at once (the server's max_num_seqs), and prompts in a static wave.
    token_budget
        Most tokens in one step (the server's max_num_batched_tokens). So few that prompts go in chunks, to be seen.
    prompts_file
        Prompts instead of the six built in: a JSON object a line, {"prompt": "Hello", "max_tokens": 20}.
    save
        Draw timelines and masks into this file (.png, .svg or .pdf). Needs matplotlib.
    color
        Use colors, where the output is a terminal.
    """
    from rich.console import Console

    from engine.errors import EngineError
    from server.explain import picture
    from server.explain.jobs import DEFAULT_PROMPTS, read_prompts
    from server.explain.report import MAX_WIDTH, print_report
    from server.explain.run import compare

    warn(loaded.warnings)
    config = EngineConfig(
        model=replace(loaded.settings.engine.model, dtype="float32"),
        cache=replace(loaded.settings.engine.cache, block_size=16),  # small, so that short prompts can share one
        scheduler=SchedulerConfig(max_num_seqs=slots, max_num_batched_tokens=token_budget),
    )
    try:
        if save is not None:
            picture.check_can_save(save)
        prompts = DEFAULT_PROMPTS if prompts_file is None else read_prompts(prompts_file)
        with show_progress() as progress:
            comparison = compare(config, prompts, progress)
        width = None if sys.stdout.isatty() else MAX_WIDTH
        print_report(comparison, Console(highlight=False, no_color=not color or None, width=width))
        if save is not None:
            picture.save_picture(comparison, save)
            print(f"\nThe picture is in {save}.")
    except EngineError as error:
        fail(str(error), hint=getattr(error, "hint", None))
    return 0 if comparison.outputs_agree else 1
