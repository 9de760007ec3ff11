"""Packing a step, number by number."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.model.batch import pack_step
from engine.params import SamplingParams
from engine.plan import PlanRow, StepPlan

SAMPLED = SamplingParams(temperature=0)


def test_a_step_number_by_number() -> None:
    plan = StepPlan(
        (
            PlanRow(7, [5, 6, 7], 0, [2], None),  # the beginning of a prompt
            PlanRow(3, [9], 9, [5, 0, 4], SAMPLED),  # decoding, in its third block
            PlanRow(8, [1, 2, 3, 4], 6, [1, 3, 6], SAMPLED),  # a prompt's end, over a block border
        )
    )
    step = pack_step(plan, block_size=4)
    assert step.token_ids.tolist() == [5, 6, 7, 9, 1, 2, 3, 4]
    assert step.position_ids.tolist() == [0, 1, 2, 9, 6, 7, 8, 9]
    assert step.slots.tolist() == [8, 9, 10, 17, 14, 15, 24, 25]
    assert step.rows.query_starts.tolist() == [0, 3, 4, 8]
    assert step.rows.context_lens.tolist() == [3, 10, 10]
    assert step.rows.block_tables[0, 0] == 2
    assert step.rows.block_tables[1:].tolist() == [[5, 0, 4], [1, 3, 6]]
    assert step.rows.block_size == 4
    assert step.logits_rows.tolist() == [3, 7]
    assert [row.request_id for row in step.sampled] == [3, 8]


def test_no_row_is_sampled() -> None:
    step = pack_step(StepPlan((PlanRow(0, [1, 2], 0, [0], None),)), block_size=4)
    assert step.logits_rows.shape == (0,)
    assert step.logits_rows.dtype == np.int64
    assert step.sampled == ()


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    block_size = draw(st.integers(1, 5))
    rows = []
    for request_id in range(draw(st.integers(1, 5))):
        start, length = draw(st.integers(0, 12)), draw(st.integers(1, 9))
        num_blocks = -(-(start + length) // block_size) + draw(st.integers(0, 2))
        blocks = draw(st.lists(st.integers(0, 99), min_size=num_blocks, max_size=num_blocks))
        tokens = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        rows.append(PlanRow(request_id, tokens, start, blocks, draw(st.sampled_from([None, SAMPLED]))))
    return StepPlan(tuple(rows)), block_size


@given(plans())
def test_any_step_token_by_token(case: tuple[StepPlan, int]) -> None:
    plan, block_size = case
    step = pack_step(plan, block_size)
    expected = [
        (token, position, row.block_ids[position // block_size] * block_size + position % block_size)
        for row in plan.rows
        for position, token in enumerate(row.token_ids, start=row.start)
    ]
    got = zip(step.token_ids.tolist(), step.position_ids.tolist(), step.slots.tolist(), strict=True)
    assert list(got) == expected
    assert step.rows.context_lens.tolist() == [row.end for row in plan.rows]
    ends = np.cumsum([len(row.token_ids) for row in plan.rows])
    assert step.rows.query_starts.tolist() == [0, *ends]
    assert step.logits_rows.tolist() == [ends[i] - 1 for i, row in enumerate(plan.rows) if row.sampling]
