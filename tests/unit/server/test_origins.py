"""Names and origins: who is answered when a web page asks."""

from __future__ import annotations

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config.schema import AccessConfig
from engine.errors import ConfigError
from server.errors import Forbidden
from server.origins import (
    RequireKnownHost,
    RequireKnownOrigin,
    allowed_hosts,
    allowed_origins,
    is_loopback,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert allowed_hosts(AccessConfig(), host) == frozenset()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "myhost", "localhost.example.com"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
    assert allowed_hosts(AccessConfig(), host) == {"*"}


def test_what_is_set_counts_wherever_it_listens() -> None:
    access = AccessConfig(allowed_hosts=("LLM.example.com.",))
    assert allowed_hosts(access, "127.0.0.1") == allowed_hosts(access, "0.0.0.0") == {"llm.example.com"}


async def passes(app: ASGIApp, headers: list[tuple[str, str]], path: str = "/v1/models", kind: str = "http") -> bool:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    scope: Scope = {"type": kind, "method": "POST", "path": path, "headers": raw}

    async def receive() -> Message:
        raise AssertionError("the body was read first")

    async def send(message: Message) -> None:
        raise AssertionError("nothing is sent here")

    try:
        await app(scope, receive, send)
    except Forbidden:
        return False
    return True


async def anyone(scope: Scope, receive: Receive, send: Send) -> None:
    """The application behind."""


NAMES = frozenset({"llm.example.com", ".internal.example.com"})


@pytest.mark.anyio
@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST",
        "localhost.:8000",
        "app.localhost:8000",
        "127.0.0.1",
        "127.0.0.1:8000",
        "[::1]:8000",
        "[::1]",
        "[fe80::1%25eth0]:8000",
        "10.1.2.3:80",
        "llm.example.com",
        "LLM.Example.com:443",
        "internal.example.com",
        "a.b.internal.example.com",
    ],
)
async def test_a_known_name(host: str) -> None:
    assert await passes(RequireKnownHost(anyone, NAMES), [("host", host)])


@pytest.mark.anyio
@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1.nip.io",
        "example.com",
        "x.llm.example.com",
        "xinternal.example.com",
        "notlocalhost",
        "localhost:8000:9000",
        "llm.example.com@evil.example",
        "évil",
    ],
)
async def test_another_name(host: str) -> None:
    assert not await passes(RequireKnownHost(anyone, NAMES), [("host", host)])
    assert await passes(RequireKnownHost(anyone, {"*"}), [("host", host)])


@pytest.mark.anyio
async def test_every_host_header_counts_and_none_is_no_browser() -> None:
    app = RequireKnownHost(anyone, NAMES)
    assert not await passes(app, [("host", "localhost"), ("host", "evil.example")])
    assert await passes(app, [])


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/live", "/ready", "/health"])
async def test_probes_may_use_any_name(path: str) -> None:
    assert await passes(RequireKnownHost(anyone, NAMES), [("host", "pool-member-3")], path)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "localhost:8000"),
        ("http://localhost:8000", "localhost:8000"),
        ("http://LOCALHOST:8000", "localhost:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://llm.example.com", "llm.example.com:80"),
        ("https://llm.example.com", "llm.example.com"),  # a proxy has taken the TLS off
        ("https://llm.example.com:443", "llm.example.com"),
        ("https://chat.example.com", "llm.example.com"),
        ("https://CHAT.example.com", "llm.example.com"),
        ("chrome-extension://abc", "localhost:8000"),
    ],
)
async def test_pages_of_the_server_and_of_allowed_origins(origin: str | None, host: str) -> None:
    app = RequireKnownOrigin(anyone, {"https://chat.example.com", "chrome-extension://abc"})
    assert await passes(app, [("host", host), *([] if origin is None else [("origin", origin)])])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://evil.example", "localhost:8000"),
        ("http://localhost:3000", "localhost:8000"),
        ("http://localhost", "localhost:8000"),
        ("http://127.0.0.1:8000", "localhost:8000"),
        ("https://chat.example.com:8443", "localhost:8000"),
        ("http://chat.example.com", "localhost:8000"),
        ("https://x.chat.example.com", "localhost:8000"),
        ("null", "localhost:8000"),
        ("null", "null"),
        ("", ""),
        ("file://", ""),
    ],
)
async def test_pages_of_others(origin: str, host: str) -> None:
    headers = [("host", host), ("origin", origin)]
    assert not await passes(RequireKnownOrigin(anyone, {"https://chat.example.com"}), headers)
    assert not await passes(RequireKnownOrigin(anyone, set()), headers)
    assert await passes(RequireKnownOrigin(anyone, {"*"}), headers)


@pytest.mark.anyio
async def test_the_lifespan_is_nobodys_request() -> None:
    assert await passes(RequireKnownOrigin(anyone, set()), [("origin", "x")], kind="lifespan")
    assert await passes(RequireKnownHost(anyone, set()), [("host", "x")], kind="lifespan")


@pytest.mark.parametrize(
    "origin", ["https://a.example/", "a.example", "https://a.example/chat", "https://", "*.a.example"]
)
def test_what_would_never_match_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="is no origin") as caught:
        allowed_origins(AccessConfig(cors_allow_origins=(origin,)))
    assert caught.value.setting == "cors_allow_origins"


def test_origins() -> None:
    given = ("https://A.example:8443", "http://localhost:3000", "chrome-extension://abc", "null")
    assert allowed_origins(AccessConfig(cors_allow_origins=given)) == {each.lower() for each in given}
