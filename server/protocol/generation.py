"""What both completions routes take and give."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from server import limits
from server.protocol.base import ApiModel, Integer, Integers, Many, OnlyFalse, documented
from server.protocol.structured import ResponseFormat, StructuredOutputs

FinishReason = Literal["stop", "length", "abort"]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_token_ids(value: Any) -> Any:
    """The keys of a JSON object are strings; these are token ids."""
    for key in value if isinstance(value, dict) else ():
        if not (isinstance(key, int) or re.fullmatch("-?(0|[1-9][0-9]{0,19})", key)):
            raise ValueError(f"logit_bias must have token ids as keys, got {key[:24]!r}")
    return value


_Key = Annotated[int, BeforeValidator(int, json_schema_input_type=str)]
"""Converted key by key, so that a bad value is at `logit_bias.5` and not at `[5]`, as if it were in an array."""

LogitBias = Annotated[dict[_Key, float], BeforeValidator(_check_token_ids, json_schema_input_type=dict[str, float])]

StopStrings = Annotated[Many[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


class StreamOptions(ApiModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    """One more chunk at the end, without choices, with the token counts."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: the token counts so far in every chunk."""
    include_obfuscation: OnlyFalse | None = None
    """Padding against guessing text from the sizes of packets is not supported."""


class SamplingRequest(ApiModel):
    """What every route takes that generates. `null` is the same as leaving a field out.

    Of `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`, the model may have defaults of its own: those
    of its `generation_config.json`, unless the server is told otherwise (`--generation-config none`).
    """

    model: str | None = None
    """The served model's name (see /v1/models). May be left out."""
    temperature: float | None = documented(minimum=0, default=1.0)
    """0 takes the most likely token always; 1 samples from the model's own distribution."""
    top_p: float | None = documented(exclusiveMinimum=0, maximum=1, default=1.0)
    """Sample from the smallest set of tokens whose probabilities add up to this; 1 is off."""
    top_k: Integer | None = documented(minimum=-1, default=0)
    """Sample from this many most likely tokens; 0 and -1 are off."""
    min_p: float | None = documented(minimum=0, maximum=1, default=0.0)
    """Drop tokens less likely than this share of the most likely one's probability; 0 is off."""
    presence_penalty: float | None = documented(minimum=-2, maximum=2, default=0.0)
    """Taken off the logit of every token that the output has already; negative makes repeating likelier."""
    frequency_penalty: float | None = documented(minimum=-2, maximum=2, default=0.0)
    """Taken off the logit of each token as many times as the output has it."""
    repetition_penalty: float | None = documented(exclusiveMinimum=0, default=1.0)
    """Makes all tokens of prompt and output less likely: divides their logits, if positive, else multiplies them."""
    logit_bias: LogitBias | None = None
    """Token id -> what is added to its logit, from -100 to 100; -100 bans the token."""
    allowed_token_ids: Integers | None = None
    """Choose among these tokens only."""
    seed: Integer | None = documented(minimum=-(2**63), maximum=2**64 - 1)
    """Same seed, same text. Left out: a fresh one each time."""
    stop: StopStrings | None = None
    """Up to 16 strings, of 4096 characters together, that end the text; it is cut before the first one."""
    stop_token_ids: Integers | None = None
    """Tokens that end the output, beside the model's own end-of-text tokens."""
    include_stop_str_in_output: bool | None = None
    """Leave the stop string in the text."""
    min_tokens: Integer | None = documented(minimum=0, default=0)
    """Tokens before the first that may end the text: end-of-text, stop tokens and stop strings do not before."""
    ignore_eos: bool | None = None
    """Go on after an end-of-text token."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's name for the same, with more kinds. Not beside a `response_format` that asks for JSON."""
    stream: bool | None = None
    """Send the text as it comes, as server-sent events."""
    priority: Integer | None = documented(minimum=-(2**63), maximum=2**63 - 1, default=0)
    """Smaller goes first."""
    timeout_ms: Integer | None = documented(minimum=1, maximum=24 * 60 * 60 * 1000)
    """Milliseconds that the whole answer may take. What has not ended by then fails: with status 504, or with an error
    event if its stream has begun. The server may have a limit of its own; the shorter one counts."""
    cache_salt: str | None = documented(maxLength=1024)
    """Prompts share cached prefixes with those of the same salt only."""
    user: str | None = documented(maxLength=limits.MAX_LABEL_LEN)
    """Who asks, for the client's own records; changes nothing. So do its two successors:"""
    safety_identifier: str | None = documented(maxLength=limits.MAX_LABEL_LEN)
    """As `user`."""
    prompt_cache_key: str | None = documented(maxLength=limits.MAX_LABEL_LEN)
    """As `user`. Prompts that begin alike share their cached prefix without it."""


class GenerationRequest(SamplingRequest):
    """What both completions routes take."""

    max_tokens: Integer | None = documented(minimum=0)
    """Most tokens to generate. Left out: 16 for /v1/completions, up to the context length for chat. 0, with `echo` or
    `prompt_logprobs` only, scores the prompt."""
    n: Integer | None = documented(minimum=1, maximum=128, default=1)
    """Choices for each prompt."""
    skip_special_tokens: bool | None = documented(default=True)
    """Leave special tokens out of the text."""
    add_special_tokens: bool | None = None
    """Begin the prompt with the model's begin-of-text token. On by default, but off for chat: templates have it."""
    truncate_prompt_tokens: Integer | None = documented(minimum=-1)
    """Keep this many of the prompt's last tokens; -1: as many as the context has room for beside `max_tokens`."""
    response_format: ResponseFormat | None = None
    """What the text must be: JSON, JSON of a schema, or anything."""
    prompt_logprobs: Integer | None = documented(minimum=0, maximum=20)
    """Report the logprob of each token of the prompt, and of this many most likely ones. Not for streams. The prompt is
    then computed whole, without the prefix cache."""
    return_token_ids: bool | None = None
    """Report the token ids of prompt and text."""
    stream_options: StreamOptions | None = None
    """With `stream` only."""


class PromptTokensDetails(ApiModel):
    """About the prompt's tokens."""

    cached_tokens: int
    """Those that the prefix cache had."""


class Usage(ApiModel):
    """Token counts of one answer."""

    prompt_tokens: int
    """Tokens of the prompts, each prompt counted once whatever `n` is."""
    completion_tokens: int
    """Tokens generated, of all choices together."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptTokenLogprob(ApiModel):
    """How likely a token was at one place of the prompt."""

    logprob: float
    """-9999.0 stands for minus infinity, here and everywhere."""
    rank: int
    """1 + how many tokens were likelier."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]
"""For each token of the prompt: by token id, its own logprob and those of the most likely ones. Null for the first."""
