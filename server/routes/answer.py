"""The last steps of both completions routes: run the work, answer in full or as a stream."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from server.admission import Place
from server.choices import Chunks, run_choices
from server.convert import Work
from server.disconnect import while_connected
from server.limits import MAX_N
from server.protocol.generation import GenerationRequest, StreamOptions
from server.render import Answer, Shape, UsageReports
from server.serving import Serving
from server.sse import event_stream

logger = logging.getLogger(__name__)

_LOGGED_PROMPT_LEN = 1024
"""Tokens of a prompt that `--log-prompts` shows."""


async def admit(request: Request, serving: Serving, body: GenerationRequest, *, num_prompts: int = 1) -> Place:
    """A place for the request, before anything costly is done for it. Raises Overloaded or TooManyRequests."""
    # Whether `n` is in range is said later; here it only must not count for nothing, or for too much.
    num_each = min(max(body.n or 1, getattr(body, "best_of", None) or 1, 1), MAX_N)
    num_bytes = len(await request.body())  # it has been read
    return serving.admission.admit(request, num_requests=num_prompts * num_each, num_bytes=num_bytes)


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
    """What the engine makes of `work`, which `request` has asked for. It begins when the first chunk is asked for."""
    if serving.log_prompts:
        _log_prompts(serving, work)
    place.correct(sum(len(each.prompt_token_ids) for each in work.generations))
    salted = _salted(work, request) if serving.prefix_cache_per_key else work
    return run_choices(serving.engine, salted, place.begun)


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
