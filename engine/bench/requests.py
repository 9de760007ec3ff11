"""Requests of random tokens, and stepping an engine through them."""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from engine.core import EngineCore, ModelInfo
from engine.errors import ConfigError
from engine.messages import Abort, Failed, StepReport, Submit
from engine.params import SamplingParams

TOKEN_IDS = (1000, 32000)
"""Prompts are drawn from these ids, where the vocabulary has them: ordinary words in most."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of random tokens, and how many tokens to generate for it, greedily."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int

    def submit(self, request_id: int) -> Submit:
        """The message for the engine."""
        params = SamplingParams(max_tokens=self.num_output_tokens, temperature=0, ignore_eos=True)
        return Submit(request_id, self.prompt_token_ids, params, arrival_s=time.monotonic())


def random_prompt(info: ModelInfo, length: int, rng: random.Random) -> tuple[int, ...]:
    """`length` random tokens: no prefix cache has seen them."""
    low, high = TOKEN_IDS if info.vocab_size >= TOKEN_IDS[1] else (0, info.vocab_size)
    return tuple(rng.randrange(low, high) for _ in range(length))


def check_room(info: ModelInfo, num_requests: int, length: int) -> None:
    """Raise ConfigError unless so many requests of prompt and output `length` fit the model and its KV cache."""
    if length > info.max_model_len:
        raise ConfigError(f"{length} tokens are more than the context length, which is {info.max_model_len}")
    num_tokens = num_requests * -(-length // info.block_size) * info.block_size
    if num_tokens > info.kv_cache_tokens:
        raise ConfigError(
            f"{num_requests} requests of {length} tokens take {num_tokens} tokens of KV cache; "
            f"it has {info.kv_cache_tokens}",
            setting="kv_cache_tokens",
            hint="make the cache larger, or measure less",
        )


def run_all(core: EngineCore, requests: Sequence[Request]) -> Generator[tuple[StepReport, float], None, None]:
    """Submit all requests to an idle engine; step until they are done: each step's report, and its seconds.

    Raises the error of a request that fails. Close it to leave an idle engine when stopping early.
    """
    for request_id, request in enumerate(requests):
        core.submit(request.submit(request_id))
    try:
        while core.has_work:
            started = time.perf_counter()
            report = core.step()
            yield raise_failures(report), time.perf_counter() - started
    finally:
        for request_id in range(len(requests)):
            core.abort(Abort(request_id))
        core.flush()


def raise_failures(report: StepReport) -> StepReport:
    """The report again; raises the error of a request that has failed in it."""
    for event in report.events:
        if isinstance(event, Failed):
            raise event.error
    return report
