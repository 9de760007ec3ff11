"""What a span says of a request. Never text of a prompt or an output, stop strings and error messages included.

Names are those of OpenTelemetry's conventions for generative AI (github.com/open-telemetry/semantic-conventions-genai;
all in development) and for HTTP. The former have none for what a server knows of its own times: these have the
names that vLLM gives them, `gen_ai.latency.*`, so that what was made for its traces works. Knows nothing of the SDK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.requestlog import Ended, Generated

Value = str | bool | int | float | tuple[str, ...]

_INT64_MAX = 2**63 - 1


def at_start(operation: str, *, path: str, scheme: str, request_id: str) -> dict[str, Value]:
    """Of a request that has come."""
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "chairlift",
        "gen_ai.request.id": request_id,
        "http.request.method": "POST",
        "http.route": path,
        "url.path": path,
        "url.scheme": scheme,
    }


def at_end(ended: Ended, model: str) -> dict[str, Value]:
    """Of one that has ended."""
    found: dict[str, Value | None] = {
        "gen_ai.latency.e2e": ended.ended_s - ended.began_s,
        "http.response.status_code": ended.status,
        "error.type": None if ended.failure is None else ended.failure.code or str(ended.failure.status),
        "chairlift.aborted": True if not ended.is_whole and ended.failure is None else None,
    }
    if (generated := ended.generated) is not None:
        found |= {"gen_ai.request.model": model, "gen_ai.response.model": model}
        found |= _asked(generated) | _times(generated, ended)
        found |= {
            "gen_ai.response.id": generated.response_id,
            "gen_ai.response.finish_reasons": generated.finish_reasons or None,
            "gen_ai.usage.input_tokens": generated.num_prompt_tokens,
            "gen_ai.usage.output_tokens": generated.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": generated.num_cached_tokens,
        }
    return {name: value for name, value in found.items() if value is not None}


def _asked(generated: Generated) -> dict[str, Value | None]:
    params = generated.params
    return {
        "gen_ai.request.stream": generated.is_stream or None,
        "gen_ai.request.choice.count": generated.num_choices if generated.num_choices != 1 else None,
        "gen_ai.request.max_tokens": _int64(params.max_tokens),
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.top_k": _int64(params.top_k) if params.top_k > 0 else None,
        "gen_ai.request.seed": _signed(params.seed),
        "gen_ai.request.presence_penalty": float(params.presence_penalty) or None,
        "gen_ai.request.frequency_penalty": float(params.frequency_penalty) or None,
    }


def _times(generated: Generated, ended: Ended) -> dict[str, Value | None]:
    times = generated.times
    first_token_s = _between(ended.began_s, times.first_token_s)
    end_s = ended.ended_s if times.last_token_s is None else times.last_token_s
    return {
        "gen_ai.latency.time_in_queue": times.queue_s,
        "gen_ai.latency.time_to_first_token": first_token_s,
        "gen_ai.latency.time_in_model_prefill": _between(times.first_scheduled_s, times.first_token_s),
        "gen_ai.latency.time_in_model_decode": _between(times.first_token_s, end_s),
        "gen_ai.response.time_to_first_chunk": first_token_s if generated.is_stream else None,
    }


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _int64(value: int | None) -> int | None:
    """OTLP has no larger ones: with one of them the whole batch would be lost."""
    return None if value is None else min(value, _INT64_MAX)


def _signed(seed: int | None) -> int | None:
    """Seeds may be signed or not, and are the same modulo 2**64."""
    return seed if seed is None or seed <= _INT64_MAX else seed - 2**64
