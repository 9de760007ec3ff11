"""Who may attend to whom in one step. Pure.

A step is one packed row of tokens. A token may see the keys of its own request up to itself: those in the KV cache, and
those of this step at or before its place. Over the whole row that is a block-diagonal mask with causal blocks. The
engine never builds it (the paged attention walks each request's own blocks); it is built here to be looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.explain.timeline import Phase, Step


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one step of T tokens: a row for each token, a column for each key.

    The columns of cached keys may stand for `keys_per_column` keys each, so that many fit on a line.
    """

    requests: tuple[int, ...]
    """[T] the request of each row, and of each of this step's keys."""
    positions: tuple[int, ...]
    """[T] the position of each row in its request."""
    phases: tuple[Phase, ...]
    cached_requests: tuple[int, ...]
    """[C] the request of each column of cached keys."""
    keys_per_column: int
    cached: npt.NDArray[np.bool_]
    """[T, C] whether a token may attend to the cached keys."""
    packed: npt.NDArray[np.bool_]
    """[T, T] whether a token may attend to the keys of this step."""


def make_mask(step: Step, keys_per_column: int = 1) -> Mask:
    """The mask of a step."""
    requests = np.repeat([share.request for share in step], [share.num_tokens for share in step])
    positions = np.concatenate([np.arange(share.start, share.end) for share in step])
    cached_requests = np.repeat(
        [share.request for share in step], [-(-share.start // keys_per_column) for share in step]
    )
    same = requests[:, None] == requests[None, :]
    return Mask(
        requests=tuple(requests.tolist()),
        positions=tuple(positions.tolist()),
        phases=tuple(share.phase for share in step for _ in range(share.num_tokens)),
        cached_requests=tuple(cached_requests.tolist()),
        keys_per_column=keys_per_column,
        cached=requests[:, None] == cached_requests[None, :],
        packed=same & (positions[None, :] <= positions[:, None]),
    )


def fitting_keys_per_column(step: Step, width: int) -> int:
    """The least keys per column with which the step's cached keys take at most `width` columns (or one a request)."""
    keys_per_column = 1
    while (
        sum(-(-share.start // keys_per_column) for share in step) > width
        and max(share.start for share in step) > keys_per_column
    ):
        keys_per_column += 1
    return keys_per_column


def count_attended(step: Step) -> tuple[int, int]:
    """How many (token, key) pairs may attend, and how many the whole rectangle has."""
    attended = sum(share.num_tokens * share.start + share.num_tokens * (share.num_tokens + 1) // 2 for share in step)
    num_tokens = sum(share.num_tokens for share in step)
    return attended, num_tokens * sum(share.end for share in step)
