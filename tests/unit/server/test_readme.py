"""server/README.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from server.errors import STATUS_TABLE

README = Path(__file__).parents[3] / "server" / "README.md"


def test_its_error_table_is_the_codes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| `(\w+)` \| `(\w+)` \|$", README.read_text("utf-8"), re.MULTILINE)
    assert rows == [(kind.__name__, str(row.status), row.type, row.code) for kind, row in STATUS_TABLE.items()]


def test_every_file_that_it_names_is_there() -> None:
    names = set(re.findall(r"\b((?:[a-z0-9_]+/)*[a-z0-9_]+\.py)\b", README.read_text("utf-8")))
    assert len(names) > 15
    root = README.parents[1]
    assert [name for name in names if not ((README.parent / name).exists() or (root / name).exists())] == []
