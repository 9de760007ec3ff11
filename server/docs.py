"""The tables of README.md, made from the code: `make docs`. A test holds the file against them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from config.describe import describe, section_title
from server.metrics import describe_metrics


def settings_table() -> str:
    """Every setting, a table for each section."""
    parts = []
    settings = [setting for setting in describe() if not setting.hidden]
    for section in dict.fromkeys(setting.section for setting in settings):
        title, description = section_title(section)
        rows = [
            (f"`{setting.flag}`", setting.kind.replace("|", ", "), _default(setting.default), setting.doc)
            for setting in settings
            if setting.section is section
        ]
        parts.append(f"**{title}**: {description}\n\n{_table(('Flag', 'Value', 'Default', 'Meaning'), rows)}")
    return "\n\n".join(parts)


def metrics_table() -> str:
    """Every metric."""
    rows = ((f"`{row.name}`", row.type, ", ".join(row.labels), row.doc) for row in describe_metrics())
    return _table(("Metric", "Type", "Labels", "Meaning"), rows)


TABLES: dict[str, Callable[[], str]] = {"settings": settings_table, "metrics": metrics_table}


def with_tables(text: str) -> str:
    """`text` with what stands between `<!-- NAME: ... -->` and `<!-- /NAME -->` made anew, for each of TABLES."""
    for name, make in TABLES.items():
        begin, end = rf"<!-- {name}:[^>]* -->\n", rf"<!-- /{name} -->"
        match = re.search(rf"({begin}).*?({end})", text, re.DOTALL)
        assert match is not None, f"no place for the table of {name}"
        text = f"{text[: match.end(1)]}\n{make()}\n\n{text[match.start(2) :]}"
    return text


def _default(value: object) -> str:
    if value is None or value == ():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(with_tables(readme.read_text("utf-8")), "utf-8")
