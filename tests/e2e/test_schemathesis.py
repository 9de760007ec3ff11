"""What schemathesis makes of the OpenAPI document, sent to the server: what the document allows, and what it does not.

It holds the answers to the document too: status, content type and schema. The bodies of `test_bad_fields.py` are wrong
in one place; these are of all shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.chaos.model import save_served_model
from tests.e2e.places import MODEL
from tests.e2e.process import Daemon, running
from tests.factories_engine import FakeEngine
from tests.factories_http import make_app

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SCHEMA = schemathesis.openapi.from_dict(make_app(FakeEngine()).openapi())

NOT_IN_THE_DOCUMENT = [positive_data_acceptance]
"""Which tokens a model has, and what goes with what, no schema says: much that it lets through is refused."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("schemathesis")
    model = str(save_served_model(directory / "model"))
    arguments = ("--model", model, "--served-model-name", MODEL, "--num-threads", "1")
    with running(directory / "log", *arguments) as daemon:
        yield daemon


@SCHEMA.parametrize()
@settings(max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_server_is_as_its_document_says(case: Any, daemon: Daemon) -> None:
    response = case.call(base_url=daemon.url, timeout=60)
    unchecked = list(NOT_IN_THE_DOCUMENT)
    if response.status_code == 504 and case.body.get("timeout_ms"):
        unchecked.append(not_a_server_error)  # it asked for this
    case.validate_response(response, excluded_checks=unchecked)
