"""One daemon for all tests that leave it as they found it. Every test in this folder is marked `e2e`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.process import Daemon, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The real process with the default model and default settings."""
    with running(tmp_path_factory.mktemp("daemon") / "log") as started:
        yield started
