"""The last steps of both completions routes: run the work, answer in full or as a stream."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from server.admission import Place
from server.body import read_body
from server.choices import Chunks, run_choices
from server.convert import Work, max_output_tokens
from server.disconnect import while_connected
from server.limits import MAX_N
from server.protocol.base import ApiModel
from server.protocol.generation import GenerationRequest, StreamOptions
from server.ratelimits import Charge
from server.render import Answer, Shape, UsageReports
from server.serving import Serving
from server.sse import event_stream
from server.unsupported import UNSUPPORTED, Unsupported

logger = logging.getLogger(__name__)

_LOGGED_PROMPT_LEN = 1024
"""Tokens of a prompt that `--log-prompts` shows."""


_Model = TypeVar("_Model", bound=ApiModel)


async def read_counted(
    request: Request, serving: Serving, model: type[_Model], unsupported: Unsupported = UNSUPPORTED
) -> _Model:
    """The body of a request that its key may still make. Raises RequestRateExceeded, and what `read_body` does."""
    await request.body()  # all of it first: a client that still sends might not see the answer
    serving.rate_limits.count(request)
    return await read_body(request, model, unsupported)


async def admit(request: Request, serving: Serving, body: GenerationRequest, *, num_prompts: int = 1) -> Place:
    """A place for the request, before anything costly is done for it. Raises as `take_place` does."""
    # Whether `n` is in range is said later; here it only must not count for nothing, or for too much.
    num_each = min(max(body.n or 1, getattr(body, "best_of", None) or 1, 1), MAX_N)
    return take_place(
        request,
        serving,
        num_choices=num_prompts * num_each,
        num_bytes=len(await request.body()),  # it has been read
        max_tokens=max_output_tokens(body),
    )


def take_place(
    request: Request, serving: Serving, *, num_choices: int, num_bytes: int, max_tokens: int | None
) -> Place:
    """A place for so many choices of `max_tokens` each. Raises TokenRateExceeded, Overloaded or TooManyRequests.

    Without `max_tokens` no output is reserved: it would be the whole context, and most chats use little of it.
    """
    most = min(max(max_tokens or 0, 0), serving.engine.info.max_model_len)  # more is refused later, by its name
    serving.rate_limits.reserve(request, num_bytes=num_bytes, num_output_tokens=num_choices * most)
    return serving.admission.admit(request, num_requests=num_choices, num_bytes=num_bytes)


async def answer(
    request: Request, serving: Serving, body: GenerationRequest, work: Work, shape: Shape, place: Place
) -> Response:
    """Generate, and answer in the shape of the route. A client that leaves ends the generation."""
    rendered = Answer(shape, work, serving.engine.tokenizer, model=serving.model, fingerprint=serving.fingerprint)
    request.state.report = rendered.generated
    chunks = generate(request, serving, work, place)
    if body.stream:
        return await event_stream(request, rendered.stream(chunks, _usage_reports(body.stream_options)))
    full = asyncio.create_task(rendered.full(chunks))
    await while_connected(request.receive, full)
    return JSONResponse(full.result())


def generate(request: Request, serving: Serving, work: Work, place: Place) -> Chunks:
    """What the engine makes of `work`, which `request` has asked for. It begins when the first chunk is asked for.

    Raises TokenRateExceeded for prompts that are too long for their key.
    """
    if serving.log_prompts:
        _log_prompts(serving, work)
    place.correct(sum(len(each.prompt_token_ids) for each in work.generations))
    charge: Charge | None = getattr(request.state, "charge", None)
    if charge is not None:
        charge.correct(sum(len(each.prompt_token_ids) for each in work.generations[:: work.num_each]))
    salted = _salted(work, request) if serving.prefix_cache_per_key else work
    chunks = run_choices(serving.engine, salted, place.begun)
    return chunks if charge is None else charge.follow(chunks)


def _log_prompts(serving: Serving, work: Work) -> None:
    for generation in work.generations[:: work.num_each]:
        start = generation.prompt_token_ids[:_LOGGED_PROMPT_LEN]
        logger.info("prompt: %r", serving.engine.tokenizer.decode(start, skip_special_tokens=False))


def _salted(work: Work, request: Request) -> Work:
    """With the key in the salt of the prefix cache, beside the client's own; without keys all are one."""
    return replace(work, cache_salt=f"{getattr(request.state, 'key_id', '')}/{work.cache_salt}")


def _usage_reports(options: StreamOptions | None) -> UsageReports:
    if options is None or not options.include_usage:
        return UsageReports()
    return UsageReports(at_end=True, in_every_chunk=bool(options.continuous_usage_stats))
