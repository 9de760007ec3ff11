"""Target: URLs as people paste them, and which of them are this machine."""

from __future__ import annotations

import pytest

from loadtest.target import Target


@pytest.mark.parametrize(
    ("url", "target", "shown"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000), "http://127.0.0.1:8000"),
        ("http://localhost:8000/v1/", Target("localhost", 8000), "http://localhost:8000"),
        ("http://[::1]:9", Target("::1", 9), "http://[::1]:9"),
        ("https://example.org/llm/v1", Target("example.org", 443, True, "/llm"), "https://example.org:443/llm"),
        ("http://example.org", Target("example.org", 80), "http://example.org:80"),
    ],
)
def test_parse(url: str, target: Target, shown: str) -> None:
    assert Target.parse(url) == target
    assert target.url == shown


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://x", "http://", "http://x:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|port"):
        Target.parse(url)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
    ],
)
def test_loopback(host: str, is_loopback: bool) -> None:
    assert Target(host, 80).is_loopback is is_loopback


def test_the_key_is_not_shown() -> None:
    assert "hush" not in repr(Target("localhost", 80, api_key="hush"))
