"""Rate limits by OpenAI's own SDK against the real process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.process import Daemon, running

pytestmark = pytest.mark.slow  # it has a daemon of its own

KEYS = ("sk-one", "sk-two")
CHAT: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    arguments = ("--api-key", KEYS[0], "--api-key", KEYS[1])
    limits = ("--requests-per-minute", "600", "--tokens-per-minute", "3000")
    with running(tmp_path_factory.mktemp("limited") / "log", *arguments, *limits) as daemon:
        yield daemon


def make_client(daemon: Daemon, key: str, max_retries: int) -> OpenAI:
    return OpenAI(base_url=f"{daemon.url}/v1", api_key=key, max_retries=max_retries, timeout=60.0)


def test_the_sdk_waits_as_told_and_gets_its_answer(limited: Daemon) -> None:
    """A stream holds most of the tokens; 50 a second come back."""
    with make_client(limited, KEYS[0], 0) as impatient, make_client(limited, KEYS[0], 5) as patient:
        raw = impatient.chat.completions.with_raw_response.create(**CHAT, max_tokens=8)
        usage = raw.parse().usage
        assert usage is not None
        assert raw.headers["x-ratelimit-limit-tokens"] == "3000"
        assert 3000 - usage.total_tokens <= int(raw.headers["x-ratelimit-remaining-tokens"]) <= 3000
        assert raw.headers["x-ratelimit-remaining-requests"] in ("599", "600")
        assert raw.headers["x-ratelimit-reset-tokens"].endswith("s")
        with impatient.chat.completions.create(**CHAT, max_tokens=2900, stream=True, extra_body={"ignore_eos": True}):
            with pytest.raises(openai.RateLimitError) as caught:
                impatient.chat.completions.create(**CHAT, max_tokens=400)
            assert (caught.value.type, caught.value.code) == ("tokens", "rate_limit_exceeded")
            wait_ms = int(caught.value.response.headers["retry-after-ms"])
            assert 0 < wait_ms <= 10_000
            retried = patient.chat.completions.with_raw_response.create(**CHAT, max_tokens=400)
            assert retried.retries_taken >= 1
            assert retried.parse().choices[0].message.content
        with make_client(limited, KEYS[1], 0) as other:
            assert other.chat.completions.create(**CHAT, max_tokens=400).choices[0].message.content


def test_what_can_never_pass_is_not_asked_for_again(limited: Daemon) -> None:
    with make_client(limited, KEYS[1], 5) as client:
        before = limited_count(limited)
        with pytest.raises(openai.RateLimitError, match="too large to pass at any time") as caught:
            client.chat.completions.create(**CHAT, max_tokens=3001)
        assert caught.value.type == "tokens"
        assert limited_count(limited) == before + 1


def limited_count(daemon: Daemon) -> float:
    """How often a request was too large."""
    scrape = httpx.get(f"{daemon.url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=10.0)
    samples = [sample for family in text_string_to_metric_families(scrape.text) for sample in family.samples]
    [value] = [each.value for each in samples if each.labels.get("limit") == "too_large"]
    return float(value)
