"""timeout_ms by OpenAI's own SDK against the real process."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.e2e.process import Daemon

LONG: dict[str, Any] = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 2000}
SOON = {"timeout_ms": 700, "ignore_eos": True}


def test_an_answer_that_takes_too_long_is_504_and_not_asked_for_again(daemon: Daemon) -> None:
    asked: list[httpx.Request] = []
    began_s = time.monotonic()
    with (
        httpx.Client(event_hooks={"request": [asked.append]}, timeout=60.0) as http,
        OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=5, http_client=http) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.completions.create(**LONG, extra_body=SOON)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert time.monotonic() - began_s >= 0.7
    assert len(asked) == 1


def test_a_stream_ends_with_what_there_is_and_an_error(daemon: Daemon) -> None:
    texts: list[str] = []
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:

        def read(timeout_ms: int) -> None:
            stream = client.completions.create(**LONG, stream=True, extra_body=SOON | {"timeout_ms": timeout_ms})
            texts.extend(chunk.choices[0].text for chunk in stream)

        for timeout_ms in (700, 3000, 15_000):  # on a busy machine there may be nothing yet, and so a status
            with pytest.raises(openai.APIError, match="deadline"):
                read(timeout_ms)
            if texts:
                break
    assert "".join(texts)
