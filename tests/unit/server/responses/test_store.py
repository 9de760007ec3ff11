"""Responses are kept within bounds, each for its owner alone."""

from __future__ import annotations

from typing import Any

from server.responses.store import Conversation, ResponseStore, Stored

ME = "me"


def stored(text: str = "", owner: str = ME) -> Stored:
    item: dict[str, Any] = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return Stored.of(owner, {"id": "r", "output": [item]}, before=[{"role": "user", "content": "hi"}])


def test_it_is_its_owners() -> None:
    store = ResponseStore(10, 10_000)
    store.put("r", stored())
    assert store.get("r", ME) is not None
    assert store.get("r", "you") is None
    assert store.get("s", ME) is None


def test_the_least_recently_used_goes() -> None:
    store = ResponseStore(2, 10_000)
    store.put("a", stored())
    store.put("b", stored())
    assert store.get("a", "you") is None  # which does not use it
    store.get("a", ME)
    store.put("c", stored())
    assert [store.get(each, ME) is not None for each in "abc"] == [True, False, True]
    assert len(store) == 2


def test_bytes_are_bounded_and_counted() -> None:
    one = stored("x" * 100).num_bytes
    store = ResponseStore(100, 2 * one)
    for name in "abc":
        store.put(name, stored("x" * 100))
    assert store.num_bytes == 2 * one
    assert store.get("a", ME) is None
    store.put("c", stored("x" * 100))  # again
    assert store.num_bytes == 2 * one
    store.put("huge", stored("x" * 1000))
    assert (len(store), store.num_bytes) == (0, 0)
    store.drop("huge")
    assert store.num_bytes == 0


def test_characters_are_counted_as_bytes() -> None:
    assert stored("é" * 100).num_bytes - stored("e" * 100).num_bytes == 2 * 100


def test_one_that_keeps_nothing_is_off() -> None:
    store = ResponseStore(0, 1000)
    assert not store.is_on
    store.put("r", stored())
    assert len(store) == 0


def test_a_conversation_comes_back_as_it_was() -> None:
    conversation = Conversation.of(stored("é"))
    assert [item["role"] for item in conversation.raw] == ["user", "assistant"]
    assert conversation.items[1].content[0].text == "é"  # type: ignore[attr-defined]
