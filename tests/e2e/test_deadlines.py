"""timeout_ms by OpenAI's own SDK against the real process."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.process import Daemon

LONG: dict[str, Any] = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 2000}
SOON = {"timeout_ms": 700, "ignore_eos": True}


def test_an_answer_that_takes_too_long_is_504_and_not_asked_for_again(daemon: Daemon) -> None:
    began_s = time.monotonic()
    with (
        OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=5) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.completions.create(**LONG, extra_body=SOON)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert 0.7 <= time.monotonic() - began_s < 4.2  # six times would take that


def test_a_stream_ends_with_what_there_is_and_an_error(daemon: Daemon) -> None:
    texts = []
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(**LONG, stream=True, extra_body=SOON)
        with pytest.raises(openai.APIError, match="deadline"):
            texts += (chunk.choices[0].text for chunk in stream)
    assert "".join(texts)
