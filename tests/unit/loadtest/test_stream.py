"""StreamReader: which chunks count, who counts the tokens, and when a stream is whole."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.record import RequestRecord
from loadtest.stream import StreamReader
from tests.unit.loadtest.sse_server import event, text_chunk, usage_chunk


def read(*events: dict[str, Any], num_prompt_tokens: int | None = None) -> RequestRecord:
    """Feed one event each second, from 1 s on, to a request that was sent at 0; it ends one second after the last."""
    record = RequestRecord(started_s=0.0, num_prompt_tokens=num_prompt_tokens)
    reader = StreamReader(record)
    for second, payload in enumerate(events, start=1):
        reader(event(payload), float(second))
    reader.close(len(events) + 1.0)
    return record


def delta(finish_reason: str | None = None, **fields: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def test_times_and_usage_of_a_completion() -> None:
    record = read(text_chunk("a"), text_chunk("b"), text_chunk("c", "length"), usage_chunk(7, 5, cached_tokens=2))
    assert record.failure is None
    assert record.ttft_s == 1.0
    assert record.itl_s == [1.0, 1.0]
    assert record.e2e_s == 5.0
    assert record.tpot_s == 1.0  # four seconds after the first chunk, for the four tokens after the first
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (7, 2, 5)
    assert record.counted_by == "usage"


def test_without_usage_chunks_are_counted_and_the_prompt_is_what_was_sent() -> None:
    record = read(text_chunk("a"), text_chunk("b", "length"), num_prompt_tokens=9)
    assert (record.num_prompt_tokens, record.num_output_tokens, record.counted_by) == (9, 2, "chunks")


def test_a_token_without_text_counts() -> None:
    """A token whose characters are still incomplete, or a special one, is a chunk with empty text."""
    assert read(text_chunk("a"), text_chunk(""), text_chunk("b", "stop")).chunk_times_s == [1.0, 2.0, 3.0]


def test_a_last_chunk_with_only_the_finish_reason_does_not_count() -> None:
    record = read(text_chunk("a"), text_chunk("", "stop"))
    assert record.chunk_times_s == [1.0]
    assert record.failure is None


def test_chat_does_not_count_the_role() -> None:
    record = read(delta(role="assistant", content=""), delta(content="Hi"), delta(content="!"), delta("stop"))
    assert record.chunk_times_s == [2.0, 3.0]
    assert record.failure is None


def test_chat_counts_a_role_that_comes_with_text_and_reasoning() -> None:
    record = read(delta(role="assistant", content="Hi"), delta(reasoning_content="hm"), delta("stop", content="!"))
    assert record.chunk_times_s == [1.0, 2.0, 3.0]


def test_events_of_one_piece_share_its_time() -> None:
    record = RequestRecord(started_s=0.0)
    StreamReader(record)(event(text_chunk("a")) + event(text_chunk("b")) + b"data: [DONE]\n\n", 3.0)
    assert record.chunk_times_s == [3.0, 3.0]


def test_a_stream_without_finish_reason_is_truncated() -> None:
    record = read(text_chunk("a"), text_chunk("b"))
    assert record.failure is not None
    assert record.failure.kind == "truncated"


@pytest.mark.parametrize("error", [{"message": "engine died", "code": 500}, "engine died"])
def test_an_error_event_is_a_failure_with_its_message(error: object) -> None:
    record = read(text_chunk("a"), {"error": error})
    assert record.failure is not None
    assert (record.failure.kind, record.failure.message) == ("error event", "engine died")


@pytest.mark.parametrize("payload", [b"data: {oops\n\n", b"data: 3\n\n"])
def test_what_is_not_a_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON object|Expecting"):
        StreamReader(RequestRecord(started_s=0.0))(payload, 1.0)


def test_tpot_needs_two_tokens() -> None:
    assert read(text_chunk("a", "length"), usage_chunk(1, 1)).tpot_s is None
