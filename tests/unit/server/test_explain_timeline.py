"""Timelines of both ways to batch, from waves and from plans."""

from __future__ import annotations

from engine.params import SamplingParams
from engine.plan import PlanRow, StepPlan
from server.explain.timeline import (
    Admission,
    Phase,
    Segment,
    Share,
    Timeline,
    continuous_timeline,
    padded_size,
    pick_steps,
    static_timeline,
    step_story,
)
from tests.factories_explain import make_comparison, make_jobs, make_waves


def plan(*rows: tuple[int, int, int]) -> StepPlan:
    """A plan of rows (request, start, number of tokens)."""
    return StepPlan(tuple(PlanRow(request, [1] * size, start, [0], SamplingParams()) for request, start, size in rows))


def test_static_waves_pad_prompts_and_drag_finished_rows_along() -> None:
    jobs = make_jobs((2, 4, 3), (1, 3, 2))
    timeline = static_timeline(make_waves(jobs, 2), jobs)
    assert timeline.num_slots == 2
    assert timeline.steps == (
        (Share(0, 0, Phase.PREFILL, 0, 2, 2), Share(1, 1, Phase.PREFILL, 0, 4, 0)),
        (Share(0, 0, Phase.IDLE, 2, 0, 1), Share(1, 1, Phase.DECODE, 4, 1)),
        (Share(0, 0, Phase.IDLE, 3, 0, 1), Share(1, 1, Phase.DECODE, 5, 1)),
        (Share(2, 0, Phase.PREFILL, 0, 3, 0),),
        (Share(2, 0, Phase.DECODE, 3, 1),),
    )
    assert (timeline.num_useful, timeline.num_prompt_padding, timeline.num_idle) == (12, 2, 2)
    assert timeline.num_computed == 16
    assert timeline.num_useful == sum(job.num_computed_tokens for job in jobs)


def test_a_newcomer_takes_the_lowest_slot_that_is_free() -> None:
    jobs = make_jobs((3, 2, 2, 2), (1, 1, 2, 1))
    plans = [
        plan((0, 0, 2), (1, 0, 2)),
        plan((0, 2, 1), (2, 0, 2)),
        plan((2, 2, 1), (3, 1, 1)),
    ]
    timeline = continuous_timeline(plans, jobs, 2)
    assert [[share.slot for share in step] for step in timeline.steps] == [[0, 1], [0, 1], [1, 0]]
    assert timeline.admissions() == [
        Admission(0, 0, 0, 0),
        Admission(1, 1, 0, 0),
        Admission(2, 1, 1, 0, previous=1, left_at=0),
        Admission(3, 0, 2, 1, previous=0, left_at=1),
    ]
    assert timeline.steps[2][0] == Share(2, 1, Phase.DECODE, 2, 1)
    assert timeline.steps[2][1].phase is Phase.PREFILL, "its last prompt token, after a prefix hit"


def test_segments_are_as_few_as_may_be() -> None:
    jobs = make_jobs((2, 4, 3), (1, 3, 2))
    segments = list(static_timeline(make_waves(jobs, 2), jobs).segments())
    assert segments == [
        Segment(0, 0, Phase.PREFILL, 0, 1),
        Segment(0, 0, Phase.IDLE, 1, 3),
        Segment(2, 0, Phase.PREFILL, 3, 4),
        Segment(2, 0, Phase.DECODE, 4, 5),
        Segment(1, 1, Phase.PREFILL, 0, 1),
        Segment(1, 1, Phase.DECODE, 1, 3),
    ]


def test_padded_size_is_rows_times_the_longest() -> None:
    step = (Share(0, 0, Phase.DECODE, 9, 1), Share(1, 1, Phase.PREFILL, 0, 7))
    assert padded_size(step) == 14
    assert Timeline(2, (step, step)).num_padded_to_rectangles == 28


def test_the_built_in_caps_by_the_real_scheduler() -> None:
    comparison = make_comparison(make_jobs())
    static, continuous = comparison.static_timeline, comparison.continuous_timeline
    assert len(static.steps) == 300 + 180
    assert len(continuous.steps) == 303
    assert continuous.num_computed == continuous.num_useful == static.num_useful - 24
    assert max(sum(share.num_tokens for share in step) for step in continuous.steps) == 16
    reused = [
        (comparison.jobs[a.request].label, a.slot, a.step + 1, comparison.jobs[a.previous].label, a.left_at + 1)
        for a in continuous.admissions()
        if a.previous is not None and a.left_at is not None
    ]
    assert reused == [("D", 0, 7, "A", 6), ("E", 0, 38, "D", 37), ("F", 1, 52, "B", 51)]
    assert continuous.admissions()[-1].num_cached_tokens == 24


def test_the_steps_picked_show_a_chunk_beside_decodes_and_a_newcomer_in_a_reused_slot() -> None:
    comparison = make_comparison(make_jobs())
    timeline = comparison.continuous_timeline
    chunk, arrival = pick_steps(timeline)
    assert [(s.phase, s.num_tokens) for s in timeline.steps[chunk]] == [
        (Phase.DECODE, 1),
        (Phase.DECODE, 1),
        (Phase.PREFILL, 14),
    ]
    assert timeline.steps[chunk][2].start == 14
    assert [(s.phase, s.start) for s in timeline.steps[arrival]][-1] == (Phase.PREFILL, 0)
    assert step_story(timeline, chunk, comparison.jobs) == "C's prompt goes in chunks; decodes ride along"
    assert step_story(timeline, arrival, comparison.jobs) == "D gets on where A got off; nobody else waits"


def test_decodes_stand_in_where_nothing_better_is_to_be_had() -> None:
    comparison = make_comparison(make_jobs((3, 4), (5, 5)), token_budget=16)
    assert pick_steps(comparison.continuous_timeline) == [1]
    assert step_story(comparison.continuous_timeline, 1, comparison.jobs) == "everybody decodes, one token each"


def test_a_run_without_decodes_shows_its_first_step() -> None:
    comparison = make_comparison(make_jobs((3,), (1,)))
    assert pick_steps(comparison.continuous_timeline) == [0]
    assert step_story(comparison.continuous_timeline, 0, comparison.jobs) == "prompts only"
