from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stop import StopMatcher


def search(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string to be complete ends, the longest of those that end there; by looking everywhere."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def to_hold_back(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of the text that begins a stop string."""
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    return max((n for n in range(1, len(text) + 1) if text[-n:] in beginnings), default=0)


def run(pieces: Sequence[str], stops: Sequence[str], *, include_stop_str: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop_str=include_stop_str)
    text = "".join([matcher.feed(piece) for piece in pieces])
    return text + matcher.flush(), matcher.matched


# Few letters, so that stop strings overlap, nest and repeat.
letters = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=16)


@st.composite
def pieces_of(draw: st.DrawFn, texts: st.SearchStrategy[str] = letters) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces_of(), stop_lists, st.booleans())
def test_any_split_gives_what_a_search_of_the_whole_text_gives(
    pieces: list[str], stops: list[str], include_stop_str: bool
):
    text = "".join(pieces)
    found = search(text, stops)
    if found is None:
        expected = (text, None)
    else:
        end, stop = found
        expected = (text[: end if include_stop_str else end - len(stop)], stop)
    assert run(pieces, stops, include_stop_str=include_stop_str) == expected


@given(pieces_of(), stop_lists)
def test_holds_back_what_may_begin_a_stop_string_and_no_more(pieces: list[str], stops: list[str]):
    matcher = StopMatcher(stops, include_stop_str=False)
    fed = shown = ""
    for piece in pieces:
        fed += piece
        shown += matcher.feed(piece)
        if matcher.matched is None:
            assert shown == fed[: len(fed) - to_hold_back(fed, stops)]


@given(pieces_of(), stop_lists)
def test_nothing_is_held_back_if_the_stop_string_is_to_be_shown(pieces: list[str], stops: list[str]):
    matcher = StopMatcher(stops, include_stop_str=True)
    fed = shown = ""
    for piece in pieces:
        fed += piece
        shown += matcher.feed(piece)
        assert matcher.matched is not None or shown == fed


def test_a_match_across_pieces():
    matcher = StopMatcher(["</end>"], include_stop_str=False)
    assert [matcher.feed(piece) for piece in ["one <", "/e", "nd", "> two"]] == ["one ", "", "", ""]
    assert matcher.matched == "</end>"
    assert matcher.flush() == ""


def test_what_looked_like_a_stop_string_is_shown_when_it_is_none():
    matcher = StopMatcher(["aab"], include_stop_str=False)
    assert [matcher.feed(char) for char in "aaac"] == ["", "", "a", "aac"]
    assert matcher.matched is None


@pytest.mark.parametrize(
    ("text", "stops", "shown", "matched"),
    [
        ("xabc", ["ab", "abc"], "x", "ab"),  # one begins the other: the shorter is complete first
        ("xabcd", ["abcd", "bc"], "xa", "bc"),  # one lies inside the other: never wait for the longer
        ("xabc", ["bc", "abc"], "x", "abc"),  # both end at once: the longer
        ("xabc", ["abc", "bc"], "x", "abc"),
        ("ab", ["ab"], "", "ab"),
        ("a\n\nHuman: b", ["\n\nHuman:"], "a", "\n\nHuman:"),
        ("好👩‍🚀了", ["👩‍🚀"], "好", "👩‍🚀"),
        ("nothing", [], "nothing", None),
    ],
)
def test_which_stop_string_counts(text: str, stops: list[str], shown: str, matched: str | None):
    assert run([text], stops) == (shown, matched)
    assert run(list(text), stops) == (shown, matched)


def test_text_after_a_match_is_dropped():
    matcher = StopMatcher(["."], include_stop_str=True)
    assert matcher.feed("One. Two.") == "One."
    assert matcher.feed(" Three.") == ""
    assert (matcher.flush(), matcher.matched) == ("", ".")


def test_flush_gives_what_was_held():
    matcher = StopMatcher(["</end>"], include_stop_str=False)
    assert matcher.feed("tail </en") == "tail "
    assert matcher.flush() == "</en"
    assert matcher.flush() == ""


class CountingList(list):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_work_is_linear_in_the_text():
    """a^n against a^m b: a matcher that starts over at each character takes n * m steps."""
    matcher = StopMatcher(["a" * 2000 + "b"], include_stop_str=False)
    matcher._automaton._children = children = CountingList(matcher._automaton._children)
    assert len(matcher.feed("a" * 20_000)) == 18_000
    assert 20_000 <= children.reads <= 5 * 20_000
