"""What the commands say to the person who runs them: errors, warnings, tables, and the progress of long work."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.table import Table

    from engine.progress import Progress


def say(text: str) -> None:
    """Print `text` to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def fail(message: str, *, setting: str | None = None, hint: str | None = None, status: int = 1) -> NoReturn:
    """Say in one line what is wrong, with which setting, and what would help; and exit."""
    flag = f"--{setting.replace('_', '-')}: " if setting else ""
    say(f"chairlift: {flag}{' '.join(message.split())}" + (f" ({hint})" if hint else ""))
    sys.exit(status)


def warn(messages: Iterable[str]) -> None:
    """Say what may be a mistake, a line each."""
    for message in messages:
        say(f"chairlift: warning: {message}")


def print_table(table: Table) -> None:
    """Print a table to stdout; into a pipe or a file without breaking its lines."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A function to report progress to, from any thread: a bar in a terminal, a line for each stage elsewhere."""
    if sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    stage, share = TextColumn("{task.description}"), TaskProgressColumn(text_format_no_percentage="")
    columns = [SpinnerColumn(), stage, BarColumn(), share, TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def report(stage: str, done: float | None = None) -> None:
            if [task.description for task in bar.tasks] != [stage]:
                for task_id in bar.task_ids:
                    bar.remove_task(task_id)
                bar.add_task(stage, total=None)  # the bar pulses until there is a share to show
            if done is not None:
                bar.update(bar.task_ids[0], total=1.0, completed=done)

        yield report


def _lines() -> Progress:
    started, last = time.monotonic(), ""

    def report(stage: str, done: float | None = None) -> None:
        nonlocal last
        if stage != last:
            last = stage
            say(f"[{time.monotonic() - started:5.1f} s] {stage}")

    return report
