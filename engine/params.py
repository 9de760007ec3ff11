"""SamplingParams: how one request's tokens are chosen, and when it ends. Validated once, here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MIN_TEMPERATURE = 1e-5  # below it, logits / temperature overflows: such a request is greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    Raises `RequestError` naming the field when a value is out of range.
    """

    max_tokens: int | None = 16
    """Most tokens to generate; None: as many as the context holds."""

    temperature: float = 1.0
    """0 (and anything below 1e-5) takes the most likely token always."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this; 1 is off."""

    top_k: int = 0
    """Sample from this many most likely tokens; 0 and -1 are off."""

    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability; 0 is off."""

    seed: int | None = None
    """Same seed, same tokens. None: a fresh one. Any 64-bit integer, signed or not."""

    stop: tuple[str, ...] = ()
    """Strings that end the text; it is cut before the first one."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's own end-of-text tokens."""

    include_stop_str_in_output: bool = False
    """Leave the stop string in the text."""

    ignore_eos: bool = False
    """Go on after an end-of-text token."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken always."""
        return self.temperature < MIN_TEMPERATURE

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, ">= 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(self.top_k >= -1, "top_k", self.top_k, ">= 1, or 0 or -1 for off")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        _check(all(self.stop), "stop", '""', "made of strings that are not empty")
        count = len(self.stop_token_ids)
        _check(count <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"{count} ids", f"at most {MAX_STOP_TOKEN_IDS}")


def _check(ok: bool, param: str, value: object, rule: str) -> None:
    if not ok:
        raise RequestError(f"{param} must be {rule}, got {value}", param=param, code="invalid_value")
