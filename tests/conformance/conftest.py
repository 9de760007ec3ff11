"""The server that is looked at: our own, started here, or any at `--base-url`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.api import CHAT, COMPLETIONS, Api
from tests.e2e.process import Daemon, running

OUR_KEY = "sk-of-the-conformance-cases"
FAULTY_TOKENS = {COMPLETIONS: 31337, CHAT: 31338}
"""Of our own server: three steps of prompts that begin with one of these succeed, and none after. One case each."""
FAULTS = (f"launch:raise@4x0?{token}" for token in FAULTY_TOKENS.values())
OUR_ARGUMENTS = ("--api-key", OUR_KEY, *(word for fault in FAULTS for word in ("--faults", fault)))


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
def our_own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon | None]:
    """Our own server, with a key and a fault; None: it is another one."""
    if request.config.getoption("--base-url", default=None) is not None:
        yield None
        return
    with running(tmp_path_factory.mktemp("conformance") / "log", *OUR_ARGUMENTS) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def api(request: pytest.FixtureRequest, our_own: Daemon | None) -> Iterator[Api]:
    """The server."""
    option = request.config.getoption
    if our_own is not None:
        with Api(our_own.url, None, OUR_KEY, is_ours=True) as api:
            yield api
        return
    model, key = option("--model", default=None), option("--api-key", default=None)
    with Api(option("--base-url").rstrip("/"), model, key) as api:
        yield api


@pytest.fixture
def faulty_tokens(our_own: Daemon | None) -> dict[str, int]:
    """A server of others' cannot be made to fail."""
    if our_own is None:
        pytest.skip("only our own server can be made to fail")
    return FAULTY_TOKENS


@pytest.fixture
def key(api: Api) -> str:
    """A key without which the server answers nothing."""
    if api.key is None:
        pytest.skip("no --api-key: the server may have none")
    return api.key


@pytest.fixture
def log(our_own: Daemon | None) -> Daemon:
    """Of a server of others' nothing is known but what it answers."""
    if our_own is None:
        pytest.skip("only our own server's log can be read")
    return our_own
