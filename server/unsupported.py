"""Fields that clients know from OpenAI or vLLM and that are not built here yet: refused by name, never ignored.

A value that asks for nothing (`length_penalty: 1`, `tools: []`) is let through, since many clients send their whole
set of defaults. To build a field: add it to the model in `server.protocol`, use it in `convert`, take it out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import RequestError

Unsupported = Mapping[str, tuple[Any, ...]]
"""Field -> the values, beside null, that ask for nothing."""

UNSUPPORTED: Unsupported = {
    # Sampling
    "length_penalty": (1,),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "watermarking": (False,),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    # What is reported
    "logprob_token_ids": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_token_strs": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (True,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    # The shape of the output
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    # The prompt
    "suffix": ("",),
    "prompt_embeds": (),
    "truncation_side": ("left",),
    "chat_template": (),
    "documents": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "web_search_options": (),
    # How it is served
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "moderation": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "request_id": (),
    "session_id": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
}
"""Of the completions routes."""

UNSUPPORTED_RESPONSES: Unsupported = {
    "access_programs": (),
    "background_options": ({},),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Of /v1/responses."""

UNSUPPORTED_RESPONSE_QUERY: Unsupported = {
    "include": (),
    "include[]": (),
    "include_obfuscation": ("false",),
    "starting_after": (),
    "stream": ("false",),
}
"""Of GET /v1/responses/{id}."""


def refuse_unsupported(body: Mapping[str, Any], unsupported: Unsupported = UNSUPPORTED) -> None:
    """Raise RequestError for the first field of `body` that asks for something that is not there yet."""
    for name, value in body.items():
        if name not in unsupported or value is None:
            continue
        if not any(_same(value, neutral) for neutral in unsupported[name]):
            raise RequestError(
                f"{name} is not supported by this server: leave it out", param=name, code="unsupported_parameter"
            )


def _same(value: Any, neutral: Any) -> bool:
    """Equality as JSON has it: 0 is 0.0, but not false."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
