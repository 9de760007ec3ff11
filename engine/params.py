"""SamplingParams: how one request's tokens are chosen, and when it ends. Validated once, here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 4096  # characters of all of them: the automaton that finds them takes 300 bytes for each
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 2**18  # which is as many as any vocabulary has; they are looked at in every step
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_GRAMMAR_LEN = 128 * 1024
MIN_TEMPERATURE = 1e-5  # below it, logits / temperature overflows: such a request is greedy


@dataclass(frozen=True, slots=True)
class FreePrefix:
    """Text of any kind that comes before what a grammar describes, up to the first `end`: a model's thoughts, say."""

    end: str
    begin: str = ""
    """What it begins with; the output may then do without such text. "": the output is in the midst of it from its
    first token on, since the prompt has begun it, and cannot end before `end` has come."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an output must be, as its author wrote it. Whether it can be compiled is found out later (`engine.grammar`).

    Raises `RequestError` naming `param` when it is empty, too long or not Unicode.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark", "calls"]
    text: str = ""
    """A JSON schema, as JSON; a regular expression in Rust's syntax, for all of the output; a JSON array of strings,
    one of which the output is; a grammar in llguidance's Lark; what `calls` makes. For json_object nothing."""
    param: str = field(default="grammar", compare=False)
    """The field of the request that it came in: what errors name."""
    prefix: FreePrefix | None = None
    """What may come before: the grammar describes the rest."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, param: str = "grammar") -> GrammarSpec:
        """JSON that validates against this schema."""
        return cls("json_schema", json.dumps(schema, ensure_ascii=False), param)

    @classmethod
    def choice(cls, choices: Sequence[str], *, param: str = "grammar") -> GrammarSpec:
        """One of these texts."""
        _check(bool(choices), param, "none", "a choice of at least one string")
        return cls("choice", json.dumps(list(choices)), param)

    @classmethod
    def calls(cls, schemas: Mapping[str, Mapping[str, Any]], *, max_calls: int, param: str = "grammar") -> GrammarSpec:
        """A line of JSON for each call, `{"name": ..., "arguments": ...}`: at least one, of a name in `schemas`, with
        arguments that validate against its schema."""
        _check(bool(schemas), param, "none", "at least one function")
        text = json.dumps({"schemas": schemas, "max_calls": max_calls}, ensure_ascii=False)
        return cls("calls", text, param)

    def __post_init__(self) -> None:
        if self.kind != "json_object":
            _check(bool(self.text), self.param, '""', "text that is not empty")
        length = len(self.text)
        _check(length <= MAX_GRAMMAR_LEN, self.param, f"{length}", f"at most {MAX_GRAMMAR_LEN} characters long")
        _check(_is_unicode(self.text), self.param, "a lone surrogate", "Unicode text")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    Raises `RequestError` naming the field when a value is out of range.
    """

    max_tokens: int | None = 16
    """Most tokens to generate; None: as many as the context holds. 0 computes the prompt and ends (see
    `prompt_logprobs`)."""

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

    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output has already; negative makes repeating likelier."""

    frequency_penalty: float = 0.0
    """Taken off the logit of each token as many times as the output has it."""

    repetition_penalty: float = 1.0
    """Divides the logits, if positive (else multiplies them), of all tokens of prompt and output; 1 is off."""

    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens, from -100 to 100; -100 bans the token."""

    allowed_token_ids: tuple[int, ...] | None = None
    """Choose among these tokens only."""

    min_tokens: int = 0
    """Tokens before the first that may end the output: end-of-text and stop tokens are banned, stop strings pass."""

    stop: tuple[str, ...] = ()
    """Strings that end the text; it is cut before the first one."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's own end-of-text tokens."""

    include_stop_str_in_output: bool = False
    """Leave the stop string in the text."""

    ignore_eos: bool = False
    """Go on after an end-of-text token. Of no effect with a grammar, which says itself where the output ends."""

    grammar: GrammarSpec | None = None
    """Choose only tokens that lead to an output of this form. What ends the output early may still leave it
    incomplete: `max_tokens`, the context's length, `stop` and `stop_token_ids`."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    logprobs: int | None = None
    """Report each token's logprob, and those of this many most likely tokens; None: neither. See `sample.logprobs`."""

    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, but the first. Its prefix is then computed, not taken from the cache."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken always."""
        return self.temperature < MIN_TEMPERATURE

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check(self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 0")
        _check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, ">= 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(self.top_k >= -1, "top_k", self.top_k, ">= 1, or 0 or -1 for off")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "from -2 to 2")
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "from -2 to 2")
        penalty = self.repetition_penalty
        _check(math.isfinite(penalty) and penalty > 0, "repetition_penalty", penalty, "above 0")
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _check(count is None or 0 <= count <= MAX_LOGPROBS, name, count, f"from 0 to {MAX_LOGPROBS}")
        self._check_tokens()

    def _check_tokens(self) -> None:
        """What is said of single tokens. Whether their ids exist is for `engine.core.check_fit`."""
        count = len(self.logit_bias)
        _check(count <= MAX_LOGIT_BIASES, "logit_bias", f"{count} tokens", f"for at most {MAX_LOGIT_BIASES} tokens")
        for value in self.logit_bias.values():
            _check(-MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS, "logit_bias", value, "from -100 to 100 for each token")
        _check(self.allowed_token_ids != (), "allowed_token_ids", "none", "at least one token id")
        count = len(self.allowed_token_ids or ())
        most = MAX_ALLOWED_TOKEN_IDS
        _check(count <= most, "allowed_token_ids", f"{count} ids", f"at most {most} token ids")
        longest = math.inf if self.max_tokens is None else self.max_tokens
        _check(0 <= self.min_tokens <= longest, "min_tokens", self.min_tokens, "from 0 to max_tokens")
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        _check(all(self.stop), "stop", '""', "made of strings that are not empty")
        length = sum(map(len, self.stop))
        _check(length <= MAX_STOP_LEN, "stop", f"{length}", f"at most {MAX_STOP_LEN} characters long, all together")
        count = len(self.stop_token_ids)
        _check(count <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"{count} ids", f"at most {MAX_STOP_TOKEN_IDS}")


def _check(ok: bool, param: str, value: object, rule: str) -> None:
    if not ok:
        raise RequestError(f"{param} must be {rule}, got {value}", param=param, code="invalid_value")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
