"""What both completions routes take and give."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from server.protocol.base import ApiModel, documented

FinishReason = Literal["stop", "length", "abort"]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


class StreamOptions(ApiModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    """One more chunk at the end, without choices, with the token counts."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: the token counts so far in every chunk."""
    include_obfuscation: Literal[False] | None = None
    """Padding against guessing text from the sizes of packets is not supported."""


class GenerationRequest(ApiModel):
    """What both completions routes take. `null` is the same as leaving a field out."""

    model: str | None = None
    """The served model's name (see /v1/models). May be left out."""
    max_tokens: int | None = documented(minimum=1)
    """Most tokens to generate. Left out: 16 for /v1/completions, up to the context length for chat."""
    temperature: float | None = documented(minimum=0, default=1.0)
    """0 takes the most likely token always; 1 samples from the model's own distribution."""
    top_p: float | None = documented(exclusiveMinimum=0, maximum=1, default=1.0)
    """Sample from the smallest set of tokens whose probabilities add up to this; 1 is off."""
    top_k: int | None = documented(minimum=-1, default=0)
    """Sample from this many most likely tokens; 0 and -1 are off."""
    min_p: float | None = documented(minimum=0, maximum=1, default=0.0)
    """Drop tokens less likely than this share of the most likely one's probability; 0 is off."""
    seed: int | None = documented(minimum=-(2**63), maximum=2**64 - 1)
    """Same seed, same text. Left out: a fresh one each time."""
    n: int | None = documented(minimum=1, maximum=128, default=1)
    """Choices for each prompt."""
    stop: StopStrings | None = None
    """Up to 16 strings that end the text; it is cut before the first one."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output, beside the model's own end-of-text tokens."""
    include_stop_str_in_output: bool | None = None
    """Leave the stop string in the text."""
    ignore_eos: bool | None = None
    """Go on after an end-of-text token."""
    skip_special_tokens: bool | None = documented(default=True)
    """Leave special tokens out of the text."""
    add_special_tokens: bool | None = None
    """Begin the prompt with the model's begin-of-text token. On by default, but off for chat: templates have it."""
    stream: bool | None = None
    """Send the text as it comes, as server-sent events."""
    stream_options: StreamOptions | None = None
    """With `stream` only."""
    priority: int | None = documented(default=0)
    """Smaller goes first."""
    cache_salt: str | None = documented(maxLength=1024)
    """Prompts share cached prefixes with those of the same salt only."""
    user: str | None = None
    """Who asks, for the client's own records; changes nothing. So do its two successors:"""
    safety_identifier: str | None = None
    """As `user`."""
    prompt_cache_key: str | None = None
    """As `user`. Prompts that begin alike share their cached prefix without it."""


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
