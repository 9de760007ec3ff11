"""A server of the OpenAI API, as a client sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import pytest

Json = dict[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

BODIES: dict[str, Json] = {COMPLETIONS: {"prompt": "Hi"}, CHAT: {"messages": [{"role": "user", "content": "Hi"}]}}
"""The least that each route needs. A strict server may refuse a field of the other route's."""


GOOD: Json = {
    "top_k": 1,
    "min_p": 0.5,
    "repetition_penalty": 1.1,
    "stop_token_ids": [5],
    "min_tokens": 1,
    "ignore_eos": True,
    "truncate_prompt_tokens": 1,
    "priority": 0,
    "timeout_ms": 600_000,
    "cache_salt": "x",
    "structured_outputs": {"choice": ["a"]},
}
"""Fields of vLLM's and our own that cases send, with a value that is right."""


@dataclass
class Choice:
    """What an answer says of one choice, however it was sent."""

    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """Of the logprobs."""
    logprobs: list[float | None] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """The texts of a stream's chunks."""


@dataclass
class Answer:
    """An answer that was given."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usages: list[Json] = field(default_factory=list)
    chunks: list[Json] = field(default_factory=list)
    """Of a stream, all of them."""
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    lines: list[str] = field(default_factory=list)
    """Of a stream, as they came."""

    @property
    def text(self) -> str:
        """Of the only choice."""
        [choice] = self.choices.values()
        return choice.text

    @property
    def finish_reason(self) -> str:
        """Of the only choice, which has exactly one."""
        [choice] = self.choices.values()
        [reason] = choice.finish_reasons
        return reason

    def take(self, body: Json) -> None:
        """Add a full answer, or one chunk."""
        for each in body["choices"]:
            choice = self.choices.setdefault(each["index"], Choice())
            message = each.get("message") or each.get("delta") or {}
            text = each["text"] if "text" in each else message.get("content") or ""
            choice.text += text
            choice.pieces.append(text)
            if message.get("role"):
                choice.roles.append(message["role"])
            if each["finish_reason"] is not None:
                choice.finish_reasons.append(each["finish_reason"])
            self._take_logprobs(choice, each.get("logprobs"))
        if body.get("usage"):
            self.usages.append(body["usage"])

    @staticmethod
    def _take_logprobs(choice: Choice, logprobs: Json | None) -> None:
        if not logprobs:
            return
        if "content" in logprobs:
            choice.tokens += [entry["token"] for entry in logprobs["content"] or []]
            choice.logprobs += [entry["logprob"] for entry in logprobs["content"] or []]
        else:
            choice.tokens += logprobs["tokens"]
            choice.logprobs += logprobs["token_logprobs"]


class Api:
    """One server and one model."""

    def __init__(self, base_url: str, model: str | None, api_key: str | None, *, is_ours: bool = False) -> None:
        self.base_url = base_url
        self.is_ours = is_ours
        """Then all that we promise is asked for, and not only what OpenAI's reference says."""
        self.key = api_key
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_keepalive_connections=0)  # a server may close one just as it is used again
        self.http = httpx.Client(base_url=base_url, headers=headers, timeout=120.0, limits=limits)
        self.model = model or self.http.get("/v1/models").json()["data"][0]["id"]

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, path: str, body: Json) -> httpx.Response:
        """POST with the model's name, whatever comes back."""
        return self.http.post(path, json={"model": self.model} | body)

    @cache  # noqa: B019 - there is one for all cases
    def takes(self, path: str, name: str) -> bool:
        """Whether this field, which is not OpenAI's, is one of the server's: its type matters.

        Others may ignore it or refuse it, as they do with any name that they do not know.
        """
        body = BODIES[path] | {"max_tokens": 1}
        right, wrong = (
            # A connection of its own: a server that breaks on it may end the connection
            self.http.post(path, json={"model": self.model} | body | {name: value}, headers={"Connection": "close"})
            for value in (GOOD[name], [{"no": "such"}])
        )
        return right.status_code == 200 and wrong.status_code != 200

    def ids_of(self, text: str) -> list[int]:
        """The tokens of a text. Skips the case where there is no /tokenize of vLLM's shape."""
        response = self.post("/tokenize", {"prompt": text})
        if response.status_code != 200 or "count" not in response.json():
            pytest.skip("no /tokenize as vLLM has it")
        ids: list[int] = response.json()["tokens"]
        return ids

    def context_len(self) -> int | None:
        """If the server says it."""
        model = self.http.get("/v1/models").json()["data"][0]
        limit: int | None = model.get("max_model_len", model.get("meta", {}).get("n_ctx"))  # vLLM's name, llama.cpp's
        return limit

    def complete(self, prompt: Any, **body: Any) -> Answer:
        """POST /v1/completions, greedy unless told otherwise; as a stream if `stream` is set."""
        return self._generate(COMPLETIONS, {"prompt": prompt, "temperature": 0} | body)

    def chat(self, content: Any, **body: Any) -> Answer:
        """POST /v1/chat/completions with one message of the user (or a list of messages)."""
        is_list = isinstance(content, Sequence) and not isinstance(content, str)
        messages = content if is_list else [{"role": "user", "content": content}]
        return self._generate(CHAT, {"messages": messages, "temperature": 0} | body)

    def _generate(self, path: str, body: Json) -> Answer:
        answer = Answer()
        if not body.get("stream"):
            response = self.post(path, body)
            assert response.status_code == 200, response.text
            answer.take(response.json())
            return answer
        with self.http.stream("POST", path, json={"model": self.model} | body) as response:
            assert response.status_code == 200, response.read()
            answer.headers = response.headers
            answer.lines = response.read().decode().split("\n")
        for line in answer.lines:
            if line.startswith("data: ") and line != "data: [DONE]":
                answer.chunks.append(json.loads(line.removeprefix("data: ")))
                answer.take(answer.chunks[-1])
        return answer


def error_of(response: httpx.Response) -> Json:
    """The error of a refusal, which has the one shape that errors have."""
    assert 400 <= response.status_code < 500, f"{response.status_code}: {response.text[:300]}"
    return error_in(response.json())


def error_in(body: Json) -> Json:
    """The error of an envelope, wherever that was sent. `param` and `code` are a case of their own."""
    assert set(body) == {"error"}, body
    error: Json = body["error"]
    assert isinstance(error["message"], str), body
    assert isinstance(error["type"], str), body
    return {"param": None, "code": None} | error
