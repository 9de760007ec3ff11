"""README.md is a table of what is tested: each test that it names is there, and each advisory has the form of one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (TESTS / "security/README.md").read_text("utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| class")
]


@cache
def functions_of(file: str) -> frozenset[str]:
    module = ast.parse((TESTS / file).read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row(row: list[str]) -> None:
    _, advisories, here, tests = row
    for each in advisories.split(", "):
        assert re.fullmatch(r"CVE-20\d\d-\d{4,6}|GHSA(-[0-9a-z]{4}){3}|PYSEC-20\d\d-\d+|CWE-\d+", each), each
    assert here
    named = re.findall(r"`([\w/.]+)::(\w+)`", tests)
    assert len(named) == tests.count("::") >= 1
    for file, function in named:
        assert function in functions_of(file), f"{file} has no {function}"


def test_all_tests_of_this_folder_are_in_the_table() -> None:
    named = {name for row in ROWS for name in re.findall(r"security/([\w.]+)::", row[3])}
    files = {file.name for file in (TESTS / "security").glob("test_*.py")} - {Path(__file__).name}
    assert files == named
