"""A StepPlan as arrays: all rows packed into one, without padding. Pure: knows neither the model nor the device.

plan      row A: tokens 5 6 7 from position 0      row B: token 9 at position 40 (block table 3 8)
token_ids       5 6 7 9
position_ids    0 1 2 40
slots           where block A0 lies + 0 1 2        8 * 32 + (40 - 32)
query_starts    0 3 4
context_lens    3 41
logits_rows     2 3         (both rows are sampled: the last packed token of each)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.kernels import IntArray, PackedRows
from engine.plan import PlanRow, StepPlan


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What the model needs of a step; T tokens, S sampled rows, P scored tokens."""

    token_ids: IntArray
    """[T]"""
    position_ids: IntArray
    """[T]: the place of each token in its own sequence."""
    slots: IntArray
    """[T]: where in the KV cache each token's key and value go."""
    rows: PackedRows
    logits_rows: IntArray
    """[S + P]: the packed tokens whose logits are wanted, first those of `sampled`, then those of `scored`."""
    sampled: tuple[PlanRow, ...]
    """[S]: the plan's rows that are sampled, in plan order."""
    scored: tuple[PlanRow, ...]
    """The plan's rows that score their prompt, in plan order; together they have P targets."""


def pack_step(plan: StepPlan, block_size: int) -> StepArrays:
    """Pack the plan's rows, in plan order. Work in Python is per row, never per token."""
    rows = plan.rows
    lens = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lens, out=query_starts[1:])
    block_tables = _pad([row.block_ids for row in rows])
    row_of_token = np.repeat(np.arange(len(rows)), lens)
    position_ids = np.arange(query_starts[-1]) + (starts - query_starts[:-1])[row_of_token]
    blocks, offsets = np.divmod(position_ids, block_size)
    is_sampled = [i for i, row in enumerate(rows) if row.sampling is not None]
    is_scored = [i for i, row in enumerate(rows) if row.scoring is not None]
    scored_places = [_places_before(rows[i]) + query_starts[i] for i in is_scored]
    return StepArrays(
        token_ids=np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in rows]),
        position_ids=position_ids,
        slots=block_tables[row_of_token, blocks] * block_size + offsets,
        rows=PackedRows(query_starts, context_lens=starts + lens, block_tables=block_tables, block_size=block_size),
        logits_rows=np.concatenate([query_starts[1:][is_sampled] - 1, *scored_places]),
        sampled=tuple(rows[i] for i in is_sampled),
        scored=tuple(rows[i] for i in is_scored),
    )


def _places_before(row: PlanRow) -> IntArray:
    """Which of the row's tokens come right before its targets."""
    assert row.scoring is not None
    targets = row.scoring.targets
    return np.arange(targets.start, targets.stop) - 1 - row.start


def _pad(tables: list[Sequence[int]]) -> IntArray:
    """Block tables of any length as one array, zeros behind each."""
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
