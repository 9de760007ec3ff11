"""Makes one response: runs the engine, tells the events, keeps what has ended."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from engine.client import Chunk, Usage
from server.chat.said import Said
from server.choices import Chunks
from server.convert import Converter, Work
from server.errors import Row, row_of, to_api_error
from server.json_text import dump_line
from server.requestlog import Generated, Times
from server.responses.transcript import Event, Transcript

_ERROR_CODES = {"invalid_request_error": "invalid_prompt", "service_unavailable": "rate_limit_exceeded"}
"""Type of an error -> its code in a failed response; others are `server_error`."""


class Making:
    """One response being made: used once, as a stream or as a whole. Closes the chunks that it is given."""

    def __init__(
        self,
        response: dict[str, Any],
        work: Work,
        converter: Converter,
        *,
        owner: str,
        keep: Callable[[dict[str, Any]], None],
        request_id: str,
    ) -> None:
        """`keep` is given the response when it has ended; `owner`: see `store.Stored`."""
        self.id: str = response["id"]
        self.owner = owner
        reading = work.reading
        self._transcript = Transcript(response, reading.new_call_id if reading else secrets.token_hex)
        self._reader = None if reading is None else reading.reader()
        self._converter = converter
        self._keep = keep
        self._request_id = request_id
        self._error: Exception | None = None
        [self._generation] = work.generations
        self._last: Chunk | None = None
        self._times = Times()
        self._is_stream = False
        self._failure: Row | None = None

    @property
    def response(self) -> dict[str, Any]:
        """The response as it stands."""
        return self._transcript.response

    def generated(self) -> Generated:
        """What it has come to so far, for the log."""
        last = self._last
        usage = Usage(len(self._generation.prompt_token_ids), 0, 0) if last is None else last.usage
        finish_reason = None if last is None else last.finish_reason
        return Generated(
            response_id=self.id,
            params=self._generation.params,
            num_choices=1,
            is_stream=self._is_stream,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens,
            times=self._times,
            finish_reasons=() if finish_reason is None else (finish_reason.value,),
            failure=self._failure,
        )

    async def stream(self, chunks: Chunks) -> AsyncGenerator[str, None]:
        """The events as JSON texts. The first ones come with the first chunk: an error before it is raised."""
        self._is_stream = True
        async with aclosing(self._events(chunks)) as events:
            async for event in events:
                yield dump_line(event)

    async def full(self, chunks: Chunks) -> dict[str, Any]:
        """The whole response, which the last event carries. Raises what ended it early."""
        last: Event = {}
        async with aclosing(self._events(chunks)) as events:
            async for event in events:
                last = event
        if self._error is not None:
            raise self._error
        response: dict[str, Any] = last["response"]
        return response

    async def in_background(self, chunks: Chunks) -> None:
        """To the end, whatever that is: errors are in the response."""
        try:
            await self.full(chunks)
        except Exception as error:
            if not self._transcript.has_begun:
                for _ in self._failed(error):
                    pass

    def cancel(self) -> None:
        """It has been ended by its client's wish."""
        self._transcript.cancel()
        self._keep(self.response)

    async def _events(self, chunks: Chunks) -> AsyncGenerator[Event, None]:
        try:
            async with aclosing(chunks):
                async for _, chunk in chunks:
                    self._measure(chunk)
                    if not self._transcript.has_begun:
                        for event in self._transcript.begin():
                            yield event
                    for event in self._transcript.say(self._read(chunk.text, is_last=chunk.finish_reason is not None)):
                        yield event
                    if chunk.finish_reason is not None:
                        num_thoughts = await self._converter.num_tokens(self._transcript.thoughts)
                        last_events = self._transcript.end(
                            chunk.finish_reason,
                            chunk.usage,
                            num_reasoning_tokens=num_thoughts,
                            is_in_call=self._reader is not None and self._reader.is_in_call,
                        )
                        for event in self._kept(last_events):
                            yield event
        except Exception as error:
            self._failure = row_of(error)
            if not self._transcript.has_begun:
                raise
            self._error = error
            for event in self._failed(error):
                yield event

    def _measure(self, chunk: Chunk) -> None:
        self._times.note(chunk)
        self._last = chunk

    def _read(self, text: str, *, is_last: bool) -> Said:
        if self._reader is None:
            return Said(text)
        said = self._reader.feed(text)
        return said + self._reader.flush() if is_last else said

    def _failed(self, error: Exception) -> list[Event]:
        api_error = to_api_error(error, request_id=self._request_id)
        return self._kept(self._transcript.fail(_ERROR_CODES.get(api_error.type, "server_error"), api_error.message))

    def _kept(self, last_events: Iterable[Event]) -> list[Event]:
        """Keep the response before its end is told: who hears of it may go on from it at once."""
        events = list(last_events)
        self._keep(self.response)
        return events
