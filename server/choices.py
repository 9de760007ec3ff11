"""Runs the engine requests of one API request side by side: their chunks as one stream, in the order they come.

Closing the stream closes every one of them, and closing is how the engine learns to stop. This holds however the
stream ends: used up, closed early, cancelled because the client has left, or by an error of one of the choices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import anyio

from engine.client import AsyncEngine, Chunk
from server.convert import Work

Chunks = AsyncGenerator[tuple[int, Chunk], None]
"""Chunks with the index of the choice they belong to."""

_Item = tuple[int, Chunk] | Exception | None


async def run_choices(engine: AsyncEngine, work: Work, on_begun: Callable[[int], None]) -> Chunks:
    """Generate all choices of `work`. Raises the first error of any of them.

    `on_begun` is called for each choice with the length of its prompt, in tokens, when its first chunk has come.
    """
    streams = [
        engine.generate(
            generation.prompt_token_ids,
            generation.params,
            priority=work.priority,
            cache_salt=work.cache_salt,
            deadlines=work.deadlines,
        )
        for generation in work.generations
    ]
    if len(streams) == 1:  # nearly always; it needs no task of its own
        async with aclosing(streams[0]) as stream:
            has_begun = False
            async for chunk in stream:
                if not has_begun:
                    has_begun = True
                    on_begun(len(work.generations[0].prompt_token_ids))
                yield 0, chunk
        return
    waiting = set(range(len(streams)))
    async with aclosing(_merge(streams)) as merged:
        async for index, chunk in merged:
            if index in waiting:
                waiting.remove(index)
                on_begun(len(work.generations[index].prompt_token_ids))
            yield index, chunk


async def _merge(streams: Sequence[AsyncGenerator[Chunk, None]]) -> Chunks:
    # Bounded: when the reader is slow the pumps wait, and the engine's client puts later tokens together.
    queue: asyncio.Queue[_Item] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    num_open = len(pumps)
    try:
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        with anyio.CancelScope(shield=True):  # they end at once: cancelled, they only close their streams
            await asyncio.wait(pumps)


async def _pump(index: int, stream: AsyncGenerator[Chunk, None], queue: asyncio.Queue[_Item]) -> None:
    """Put the chunks of one choice into the queue, then None, or the error that ended it."""
    try:
        async with aclosing(stream):
            async for chunk in stream:
                await queue.put((index, chunk))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
