"""Stop strings in a stream of text: found as soon as they are complete, shown never, held back no longer than needed.

What a stop string does, whatever pieces the text comes in:
- The text ends at the first character that completes any of them. If several end there, the longest counts. That is
  what a server would do that looked after every single character; so stopping never waits for a longer stop string
  that may or may not come.
- The text shown ends before that stop string, or after it with `include_stop_str`.
- Until then, held back is the longest end of the text that begins a stop string: no character more.

Characters are compared, not bytes and not normal forms. Only text that is fed counts: a stop string in the prompt does
not, nor one that began in it.

The automaton is that of A. Aho and M. Corasick, "Efficient string matching: an aid to bibliographic search", CACM
18(6), 1975: each character is looked at once, however many stop strings there are, and the depth of the state is
exactly the length to hold back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Passes on text up to the first stop string. One per request; not for two threads at once."""

    def __init__(self, stops: Sequence[str], *, include_stop_str: bool) -> None:
        """`stops` may be empty (all text passes); none of them is an empty string."""
        assert all(stops), "an empty stop string would match everywhere"
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._include = include_stop_str
        self._automaton = _automaton_of(tuple(stops))
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> str:
        """Take in more text; returns what is safe to show. After a match all further text is dropped."""
        if self.matched is not None:
            return ""
        step, stop_at = self._automaton.step, self._automaton.stop_at
        state = self._state
        for index, char in enumerate(text):
            state = step(state, char)
            if (stop := stop_at[state]) is not None:
                self.matched = stop
                ended, self._held = self._held + text[: index + 1], ""
                return ended if self._include else ended[: len(ended) - len(stop)]
        self._state = state
        text = self._held + text
        # What will be shown even if it turns out to be a stop string need not wait.
        shown = len(text) if self._include else len(text) - self._automaton.depth[state]
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text has ended without a stop string: what was held back."""
        held, self._held, self._state = self._held, "", 0
        return held


@lru_cache(maxsize=16)
def _automaton_of(stops: tuple[str, ...]) -> _Automaton:
    """The same for all choices of a request. Nothing changes it once it is made."""
    return _Automaton(stops)


class _Automaton:
    """States are the beginnings of the stop strings, numbered by length; 0 is the empty one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fail = [0]
        """The longest proper end of each state that is a state."""
        self.depth = [0]
        """The length of each state."""
        self.stop_at: list[str | None] = [None]
        """The longest stop string that each state ends with."""
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The longest end of (state + char) that is a state."""
        while state and char not in self._children[state]:
            state = self._fail[state]
        return self._children[state].get(char, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            child = self._children[state].get(char)
            if child is None:
                child = len(self._children)
                self._children[state][char] = child
                self._children.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.stop_at.append(None)
            state = child
        self.stop_at[state] = stop

    def _link(self) -> None:
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._children[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                if self.stop_at[child] is None:
                    self.stop_at[child] = self.stop_at[self._fail[child]]
                queue.append(child)
