"""The mask of one step."""

from __future__ import annotations

import numpy as np

from server.explain.mask import count_attended, fitting_keys_per_column, make_mask
from server.explain.timeline import Phase, Share

STEP = (
    Share(request=4, slot=0, phase=Phase.DECODE, start=5, num_tokens=1),
    Share(request=2, slot=1, phase=Phase.PREFILL, start=3, num_tokens=3),
    Share(request=7, slot=2, phase=Phase.PREFILL, start=0, num_tokens=2),
)


def rows(mask: np.ndarray) -> list[str]:
    return ["".join("#" if allowed else "." for allowed in row) for row in mask]


def test_blocks_are_causal_and_apart() -> None:
    mask = make_mask(STEP)
    assert mask.requests == (4, 2, 2, 2, 7, 7)
    assert mask.positions == (5, 3, 4, 5, 0, 1)
    assert mask.phases == (Phase.DECODE, *[Phase.PREFILL] * 5)
    assert rows(mask.packed) == ["#.....", ".#....", ".##...", ".###..", "....#.", "....##"]


def test_cached_keys_are_seen_by_their_own_request() -> None:
    mask = make_mask(STEP)
    assert mask.cached_requests == (4, 4, 4, 4, 4, 2, 2, 2)
    assert rows(mask.cached) == ["#####...", ".....###", ".....###", ".....###", "........", "........"]


def test_columns_may_stand_for_several_cached_keys() -> None:
    mask = make_mask(STEP, keys_per_column=2)
    assert mask.cached_requests == (4, 4, 4, 2, 2)
    assert mask.packed.shape == (6, 6), "the step's own keys have a column each"


def test_as_few_keys_to_a_column_as_fit() -> None:
    assert fitting_keys_per_column(STEP, 8) == 1
    assert fitting_keys_per_column(STEP, 7) == 2
    assert fitting_keys_per_column(STEP, 4) == 3
    assert fitting_keys_per_column(STEP, 0) == 5, "no fewer than a column for each request"


def test_attended_pairs_are_those_of_the_mask() -> None:
    mask = make_mask(STEP)
    attended, pairs = count_attended(STEP)
    assert attended == int(mask.cached.sum() + mask.packed.sum())
    assert pairs == mask.cached.size + mask.packed.size
