"""Who may ask."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from config.schema import AccessConfig
from engine.errors import ConfigError
from server.auth import RequireKey, key_file_warnings, load_keys
from server.errors import Unauthorized

KEYS = ("first-key", "second-key", "clé")


def test_no_keys_by_default() -> None:
    assert load_keys(AccessConfig()) == ()
    assert load_keys(AccessConfig(api_key=("",))) == ()  # `CHAIRLIFT_API_KEY=`


def test_keys_of_the_settings_and_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n  b \n\nclé\n#c\n", encoding="utf-8")
    assert load_keys(AccessConfig(api_key=("a",), api_key_file=str(file))) == ("a", "b", "clé")


def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# later\n")
    with pytest.raises(ConfigError, match="has no keys") as caught:
        load_keys(AccessConfig(api_key=("a",), api_key_file=str(file)))
    assert caught.value.setting == "api_key_file"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(AccessConfig(api_key_file=str(tmp_path / "nowhere")))
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(AccessConfig(api_key_file=str(tmp_path / "bytes")))


async def ask(header: bytes | None, path: str = "/v1/models") -> bool:
    """Whether the request comes through. Its body is never asked for."""
    came_through = False

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal came_through
        came_through = True

    async def receive() -> Message:
        raise AssertionError("the body was read before the key was checked")

    async def send(message: Message) -> None:
        raise AssertionError("nothing is sent here")

    headers = [] if header is None else [(b"authorization", header)]
    scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await RequireKey(app, KEYS)(scope, receive, send)
    return came_through


@pytest.mark.anyio
@pytest.mark.parametrize(
    "header",
    [
        b"Bearer first-key",
        b"bearer second-key",
        b"Bearer  first-key ",
        "Bearer clé".encode(),
    ],
)
async def test_a_known_key_comes_through(header: bytes) -> None:
    assert await ask(header)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer first",
        b"Bearer first-key2",
        b"Bearer first-key second-key",
        b"Basic first-key",
        b"first-key",
        b"Bearer \xff\xfe",
        "Bearer clé".encode("latin-1"),
    ],
)
async def test_anything_else_does_not(header: bytes | None) -> None:
    with pytest.raises(Unauthorized):
        await ask(header)


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/live", "/ready", "/health"])
async def test_probes_need_none(path: str) -> None:
    assert await ask(None, path)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/version", "/docs", "/openapi.json", "/health/", "/live/../v1/models"]
)
async def test_everything_else_needs_one(path: str) -> None:
    with pytest.raises(Unauthorized):
        await ask(None, path)


def test_every_key_is_compared_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return a == b

    monkeypatch.setattr("server.auth.hmac.compare_digest", compare)
    RequireKey(lambda *_: None, KEYS)._check("Bearer first-key")  # type: ignore[arg-type,return-value]
    assert compared == [32, 32, 32]


def test_a_key_file_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k")
    assert key_file_warnings(AccessConfig()) == []
    for mode, warns in ((0o600, False), (0o640, False), (0o644, True)):
        file.chmod(mode)
        warnings = key_file_warnings(AccessConfig(api_key_file=str(file)))
        assert [str(file) in warning for warning in warnings] == [True] * warns


def test_no_form_of_the_settings_shows_a_secret() -> None:
    shown = repr(AccessConfig(api_key=("sk-1",), ssl_keyfile_password="pw-1"))
    assert "sk-1" not in shown
    assert "pw-1" not in shown
