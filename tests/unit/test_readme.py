"""README.md is true: its tables are made from the code, its links lead somewhere, its commands and fields exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.docs import with_tables
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "engine/README.md", "server/README.md"]


def read(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def test_tables_are_those_of_the_code():
    assert read("README.md") == with_tables(read("README.md")), "run `make docs`"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", read(page)) if "://" not in link]
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str):
    here = (ROOT / page).parent
    paths = re.findall(r"`((?:config|engine|server|loadtest|tests)/[\w./*]+)`", read(page))
    missing = [path for path in paths if not any(ROOT.glob(path)) and not any(here.glob(path))]
    assert paths
    assert not missing


def test_fields_that_it_lists_are_taken():
    (listed,) = re.findall(r"Both generating routes take (.*?)\. Prompts", read("README.md"), re.DOTALL)
    names = set(re.findall(r"`(\w+)`", listed))
    assert len(names) > 15
    assert names <= set(ChatCompletionRequest.model_fields)
    assert names - {"max_completion_tokens"} <= set(CompletionRequest.model_fields)


def test_commands_that_it_lists_exist():
    commands = re.findall(r"^\| `chairlift (\w+)", read("README.md"), re.MULTILINE)
    files = {path.stem for path in (ROOT / "server/commands").glob("*.py")}
    assert len(commands) > 4
    assert set(commands) <= files


def test_make_targets_that_it_names_exist():
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z-]+)", read(page), re.MULTILINE)}
    assert {"serve", "test"} <= named <= targets
