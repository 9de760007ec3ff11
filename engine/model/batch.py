"""A StepPlan as arrays: all rows packed into one, without padding. Pure: knows neither the model nor the device.

plan      row A: tokens 5 6 7 from position 0      row B: token 9 at position 40 (block table 3 8)
token_ids       5 6 7 9
position_ids    0 1 2 40
slots           where block A0 lies + 0 1 2        8 * 32 + (40 - 32)
query_starts    0 3 4
context_lens    3 41
block_tables    A0 0        (zeros behind)
                3  8
logits_rows     2 3         (both rows are sampled: the last packed token of each)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.kernels import PackedStep
from engine.plan import PlanRow, StepPlan


@dataclass(frozen=True, slots=True)
class StepArrays(PackedStep):
    """What the model needs of a step; of its logits, first come those of `sampled`, then those of `scored`."""

    sampled: tuple[PlanRow, ...]
    """The plan's rows that are sampled, in plan order."""
    scored: tuple[PlanRow, ...]
    """The plan's rows that score their prompt, in plan order; all their targets' logits are wanted."""

    def with_all_logits(self) -> StepArrays:
        """The same step, but for the logits of all its tokens."""
        numbers = self.numbers[: self.places[-1]] + array("q", range(self.num_tokens))
        return replace(self, numbers=numbers, num_logits=self.num_tokens)


def pack_step(plan: StepPlan, block_size: int) -> StepArrays:
    """Pack the plan's rows, in plan order. Work in Python is per row and block, never per token.

    Not in numpy: for a step of few tokens a dozen of its calls take longer than this.
    """
    rows = plan.rows
    numbers, positions, slots = array("q"), array("q"), array("q")
    query_starts, context_lens = array("q", (0,)), array("q")
    for row in rows:
        numbers.extend(row.token_ids)
        query_starts.append(len(numbers))
        end = row.end
        context_lens.append(end)
        positions.extend(range(row.start, end))
        _extend_slots(slots, row.start, end, row.block_ids, block_size)
    num_tokens = len(numbers)
    num_blocks = max(len(row.block_ids) for row in rows)
    sampled = tuple(row for row in rows if row.sampling is not None)
    scored = tuple(row for row in rows if row.scoring is not None)
    for part in (positions, slots, query_starts, context_lens):
        numbers.extend(part)
    for row in rows:
        numbers.extend(row.block_ids)
        numbers.extend((0,) * (num_blocks - len(row.block_ids)))
    num_before = len(numbers)
    for first, row in zip(query_starts, rows, strict=False):
        if row.sampling is not None:
            numbers.append(first + len(row.token_ids) - 1)
    for first, row in zip(query_starts, rows, strict=False):
        if row.scoring is not None:
            numbers.extend(_places_before(first, row.start, row.scoring.targets))
    return StepArrays(
        numbers=numbers,
        num_tokens=num_tokens,
        num_rows=len(rows),
        num_blocks=num_blocks,
        num_logits=len(numbers) - num_before,
        block_size=block_size,
        sampled=sampled,
        scored=scored,
    )


def _extend_slots(slots: array[int], start: int, end: int, block_ids: Sequence[int], block_size: int) -> None:
    """Where positions `start ... end - 1` go: block by block."""
    while start < end:
        block, offset = divmod(start, block_size)
        first = block_ids[block] * block_size + offset
        count = min(block_size - offset, end - start)
        slots.extend(range(first, first + count))
        start += count


def _places_before(first: int, start: int, targets: range) -> range:
    """Which packed tokens come right before the targets, positions of a row that has its first token at `first`."""
    return range(first + targets.start - 1 - start, first + targets.stop - 1 - start)
