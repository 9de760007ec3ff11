"""HTTPS: what is tried before the model loads. (Requests: tests/integration/test_http_tls.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from config.schema import AccessConfig
from engine.errors import ConfigError
from server.tls import tls_options
from tests.factories_tls import make_certificates


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def access(files: Path, **fields: str) -> AccessConfig:
    paths = {name: value if name.endswith("password") else str(files / value) for name, value in fields.items()}
    return AccessConfig(**paths)  # type: ignore[arg-type]


def test_without_a_certificate_there_is_none() -> None:
    assert tls_options(AccessConfig()) == {}


def test_a_certificate_with_its_key(files: Path) -> None:
    options = tls_options(access(files, ssl_certfile="cert.pem", ssl_keyfile="key.pem"))
    assert options["ssl_certfile"] == str(files / "cert.pem")
    assert options["ssl_keyfile"] == str(files / "key.pem")
    assert "ssl_cert_reqs" not in options
    tls_options(access(files, ssl_certfile="cert.pem", ssl_keyfile="locked.pem", ssl_keyfile_password="secret"))


def test_clients_must_have_certificates_if_authorities_are_named(files: Path) -> None:
    options = tls_options(access(files, ssl_certfile="cert.pem", ssl_keyfile="key.pem", ssl_ca_certs="cert.pem"))
    assert options["ssl_cert_reqs"].name == "CERT_REQUIRED"


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile"),
        ({"ssl_ca_certs": "cert.pem"}, "ssl_ca_certs"),
        ({"ssl_certfile": "nowhere.pem"}, "ssl_certfile"),
        ({"ssl_certfile": "cert.pem"}, "ssl_certfile"),  # which has no key in it
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "other.pem"}, "ssl_certfile"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "locked.pem"}, "ssl_certfile"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "locked.pem", "ssl_keyfile_password": "hush"}, "ssl_certfile"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem", "ssl_ca_certs": "nowhere.pem"}, "ssl_ca_certs"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(files: Path, fields: dict[str, str], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tls_options(access(files, **fields))
    assert caught.value.setting == setting
    assert "hush" not in str(caught.value)
