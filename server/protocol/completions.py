"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from server import limits
from server.protocol.base import ApiModel, Integer, as_integers, documented, exactly
from server.protocol.generation import FinishReason, GenerationRequest, PromptLogprobs, Usage

Prompt = str | list[int]


def _as_prompts(value: Any) -> list[Prompt]:
    """All forms of `prompt` as one: a list, of texts only or of token ids only."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("prompt must be a string, an array of strings, or token ids")
    if not value:
        raise ValueError("prompt is an empty array: it needs at least one text or token id")
    values = as_integers(value)
    kinds = set(map(type, values))
    if kinds == {int}:
        return [values]
    if len(values) > limits.MAX_CHOICES:
        raise ValueError(f"prompt has {len(values)} prompts: one request may have {limits.MAX_CHOICES}")
    if kinds == {list}:
        values = list(map(as_integers, values))
        for index, ids in enumerate(values):
            if set(map(type, ids)) - {int}:
                raise ValueError(f"prompt[{index}] must be an array of token ids, which are integers")
        return values
    if kinds != {str}:
        raise ValueError("prompt must hold strings only, token ids only, or arrays of token ids only")
    return values


Prompts = Annotated[
    list[Prompt],
    PlainValidator(_as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(GenerationRequest):
    """Text in, text on from there."""

    prompt: Prompts
    """A text, several, one prompt's token ids, or several prompts' token ids."""
    logprobs: Integer | None = documented(minimum=0, maximum=20)
    """Report the logprob of each token, and of this many most likely ones."""
    echo: bool | None = None
    """Begin the text with the prompt; with `logprobs`, those of its tokens too."""
    best_of: Integer | None = documented(minimum=1, maximum=128)
    """Generate this many choices for each prompt, and show the `n` whose tokens are likeliest on average. Not for
    streams."""
    top_logprobs: Annotated[Literal[0], exactly(0)] | None = None
    """Of chat only: see `logprobs`."""


class CompletionLogprobs(ApiModel):
    """Four arrays with an entry for each token, those of an echoed prompt first."""

    tokens: list[str]
    """The tokens' text. One that is a part of a character is written `bytes:\\xe2\\x80`."""
    token_logprobs: list[float | None]
    """Null for the first token of a prompt, which nothing predicts. -9999.0 stands for minus infinity."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens, and the one that stands there."""
    text_offset: list[int]
    """Where in the text each token begins, in characters."""


class CompletionChoice(ApiModel):
    """One text. `index` is `i * n + j` for choice j of prompt i."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    """`stop`: the model ended it, or a stop string or token did. `length`: `max_tokens` or the context is used up."""
    stop_reason: str | int | None
    """The stop string or token id that ended it."""
    prompt_logprobs: PromptLogprobs | None = None
    """With `prompt_logprobs`."""
    token_ids: list[int] | None = None
    """With `return_token_ids`: those that were generated."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""


class Completion(ApiModel):
    """A full answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    """When, in seconds since 1970."""
    model: str
    system_fingerprint: str
    """Changes with whatever may change the text: the build, the model, its number type, the kernels."""
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(ApiModel):
    """New text of one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    """Of the tokens that are new in this chunk."""
    finish_reason: FinishReason | None
    """Null until the choice's last chunk."""
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    """With `return_token_ids`: those that are new in this chunk."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`, in a choice's first chunk only."""


class CompletionChunk(ApiModel):
    """One event of a stream. The texts of a choice's chunks, joined, are the text of the full answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    """Empty in the chunk with the usage, the last one."""
    usage: Usage | None = None
