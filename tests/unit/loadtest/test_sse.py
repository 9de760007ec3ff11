"""EventSplitter: however the bytes are cut, the same payloads come out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import EventSplitter

STREAM = b': hello\n\ndata: {"a": 1}\n\nevent: x\ndata: {"b":\ndata: 2}\n\n: ping\n\ndata:{"c": 3}\n\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": 1}', b'{"b":\n2}', b'{"c": 3}', b"[DONE]"]


@pytest.mark.parametrize("stream", [STREAM, STREAM.replace(b"\n", b"\r\n")], ids=["lf", "crlf"])
@given(cuts=st.lists(st.integers(0, 2 * len(STREAM)), max_size=12))
def test_pieces_do_not_matter(stream: bytes, cuts: list[int]) -> None:
    splitter = EventSplitter()
    bounds = [0, *sorted(cuts), len(stream) * 2]
    pieces = [stream[start:end] for start, end in itertools.pairwise(bounds)]
    assert [payload for piece in pieces for payload in splitter.feed(piece)] == PAYLOADS


def test_an_event_comes_out_only_when_complete() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n") == []
    assert splitter.feed(b"\ndata: 2") == [b"1"]
    assert splitter.feed(b"\n\n") == [b"2"]
