"""The server that is looked at: our own, started here, or any at `--base-url`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.api import Api
from tests.e2e.process import running


def pytest_addoption(parser: pytest.Parser) -> None:
    """Only where this folder is named on the command line."""
    group = parser.getgroup("conformance")
    group.addoption("--base-url", help="the server to check, without /v1; left out: Chairlift with its default model")
    group.addoption("--model", help="its model; left out: the first that it lists")
    group.addoption("--api-key", help="sent as a Bearer token")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The server."""
    option = request.config.getoption
    base_url = option("--base-url", default=None)
    if base_url is not None:
        with Api(base_url.rstrip("/"), option("--model", default=None), option("--api-key", default=None)) as api:
            yield api
        return
    with running(tmp_path_factory.mktemp("conformance") / "log") as daemon, Api(daemon.url, None, None) as api:
        yield api
