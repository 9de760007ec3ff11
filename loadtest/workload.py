"""The requests to send: pure functions of a LoadSpec and its seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

_COMMON_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air teacher
"""
WORDS = tuple(_COMMON_WORDS.split())
"""With the space before it, each is one token for most tokenizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """What the requests look like."""

    num_requests: int = 64
    input_len: int = 128
    """Mean prompt length in tokens; with `text`, in words."""
    output_len: int = 64
    """Mean max_tokens."""
    spread: float = 0.5
    """Each request's lengths are drawn evenly from mean x (1 - spread) to mean x (1 + spread)."""
    seed: int = 0
    """Of lengths, prompts and arrivals: same seed, same load."""
    shared_prefix_len: int = 0
    """Tokens (words) that all prompts begin with, in addition to `input_len`."""
    token_ids: tuple[int, int] = (1000, 32000)
    """Prompts are drawn from the ids from the first to just below the second."""
    text: bool = False
    """Prompts of words instead of token ids, for servers that refuse ids."""
    chat: bool = False
    """/v1/chat/completions instead of /v1/completions; implies words."""
    ignore_eos: bool = True
    """Ask for exactly max_tokens tokens. Not OpenAI's: some servers refuse it."""
    ask_usage: bool = True
    """Ask for a last chunk with the token counts (`stream_options`)."""
    temperature: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields to add to each request's body."""

    @property
    def path(self) -> str:
        """The route that is under load."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to send."""

    body: bytes
    num_prompt_tokens: int | None
    """None when only the server can know: the prompt is text."""


def make_jobs(spec: LoadSpec, model: str) -> list[Job]:
    """The `num_requests` requests of `spec`, in order."""
    rng = random.Random(spec.seed)
    prefix = _draw(spec, spec.shared_prefix_len, rng)
    return [_make_job(spec, model, prefix, rng) for _ in range(spec.num_requests)]


def poisson_arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """When each request is due, in seconds from the start: a Poisson process of `rate` requests a second."""
    rng = random.Random(seed)
    due_s, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += rng.expovariate(rate)
        due_s.append(now_s)
    return due_s


def _make_job(spec: LoadSpec, model: str, prefix: list[int] | list[str], rng: random.Random) -> Job:
    input_len = _around(spec.input_len, spec.spread, rng)
    max_tokens = _around(spec.output_len, spec.spread, rng)
    prompt = [*prefix, *_draw(spec, input_len, rng)]
    body: dict[str, Any] = {"model": model}
    if spec.chat:
        body["messages"] = [{"role": "user", "content": " ".join(map(str, prompt))}]
    else:
        body["prompt"] = " ".join(map(str, prompt)) if spec.text else prompt
    body |= {"max_tokens": max_tokens, "temperature": spec.temperature, "stream": True}
    if spec.ask_usage:
        body["stream_options"] = {"include_usage": True}
    if spec.ignore_eos:
        body["ignore_eos"] = True
    is_text = spec.chat or spec.text
    return Job(json.dumps(body | spec.extra).encode(), None if is_text else len(prompt))


def _around(mean: int, spread: float, rng: random.Random) -> int:
    return max(1, int(mean * (1 + rng.uniform(-spread, spread))))


def _draw(spec: LoadSpec, length: int, rng: random.Random) -> list[int] | list[str]:
    if spec.chat or spec.text:
        return rng.choices(WORDS, k=length)
    return [rng.randrange(*spec.token_ids) for _ in range(length)]
