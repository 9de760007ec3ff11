"""The scheduler's rules, one by one; test_core_states drives them in any order."""

from __future__ import annotations

import pytest

from engine.core import EngineCore
from engine.messages import Abort, Failed, Finished, TokensOut
from engine.request import FinishReason
from tests.factories import EOS, FakeRunner, expected_output, make_core, make_submit


def rows(runner: FakeRunner) -> list[tuple[int, int, int]]:
    """The last plan as (request, start, count)."""
    return [(row.request_id, row.start, len(row.token_ids)) for row in runner.plans[-1].rows]


def run(core: EngineCore) -> dict[int, list[int]]:
    outputs: dict[int, list[int]] = {}
    while core.has_work:
        for event in core.step().events:
            if isinstance(event, TokensOut):
                outputs.setdefault(event.request_id, []).extend(event.token_ids)
        core.check_integrity()
    return outputs


def test_decodes_go_first_then_prompts_in_order_within_the_budget():
    core, runner = make_core(max_num_batched_tokens=10, num_blocks=32)
    core.submit(make_submit(0, [1] * 4, max_tokens=9, ignore_eos=True))
    core.step()
    core.submit(make_submit(1, [2] * 15, max_tokens=9, ignore_eos=True))
    core.submit(make_submit(2, [3] * 5, max_tokens=9, ignore_eos=True))
    core.step()
    assert rows(runner) == [(0, 4, 1), (1, 0, 9)]
    core.step()
    assert rows(runner) == [(0, 5, 1), (1, 9, 6), (2, 0, 3)]
    core.step()
    assert rows(runner) == [(0, 6, 1), (1, 15, 1), (2, 3, 2)]


def test_a_stream_gets_a_token_in_each_step_however_many_long_prompts_come():
    core, runner = make_core(max_num_batched_tokens=16, num_blocks=256)
    core.submit(make_submit(0, [1] * 4, max_tokens=60, ignore_eos=True))
    core.step()
    for step in range(50):
        core.submit(make_submit(1 + step, [2] * 100, max_tokens=1))
        core.step()
        assert rows(runner)[0] == (0, 4 + step, 1)
        assert sum(count for _, _, count in rows(runner)) <= 16


def test_a_long_prompt_is_not_starved_by_short_ones():
    """It needs most blocks, which short ones hold: none that comes later may take those that become free."""
    core, runner = make_core(num_blocks=24, max_num_batched_tokens=64, max_num_seqs=32)
    for i in range(10):
        core.submit(make_submit(i, [1 + i] * 4, max_tokens=4, ignore_eos=True))
    core.step()
    core.submit(make_submit(100, [40] * 72, max_tokens=4, ignore_eos=True))
    began: list[int] = []
    for step in range(40):
        core.submit(make_submit(200 + step, [1 + step % 30] * 4, max_tokens=4, ignore_eos=True))
        core.step()
        began += [request_id for request_id, start, _ in rows(runner) if start == 0]
        if 100 in began:
            break
    assert began == [100], "later ones went first, or it never began"


def test_only_a_row_that_reaches_the_last_known_token_is_sampled():
    core, runner = make_core(max_num_batched_tokens=4)
    core.submit(make_submit(0, [1] * 6))
    core.step()
    assert runner.plans[-1].rows[0].sampling is None
    core.step()
    assert runner.plans[-1].rows[0].sampling is not None


def test_rows_know_their_context_and_what_may_not_end_them_yet():
    core, runner = make_core(max_num_batched_tokens=4)
    core.submit(make_submit(0, [1] * 6, min_tokens=1, max_tokens=3, stop_token_ids=(7,)))
    core.step()
    core.step()
    (row,) = runner.plans[-1].rows
    assert (list(row.context), row.num_prompt_tokens) == ([1] * 6 + expected_output([1] * 6, 1, frozenset()), 6)
    assert row.banned_token_ids == {EOS, 7}
    core.step()
    assert runner.plans[-1].rows[0].banned_token_ids == ()


def test_without_chunking_a_prompt_goes_whole_even_over_the_budget():
    core, runner = make_core(max_num_batched_tokens=8, enable_chunked_prefill=False, num_blocks=32)
    core.submit(make_submit(0, [1] * 3, max_tokens=9, ignore_eos=True))
    core.submit(make_submit(1, [2] * 20, max_tokens=9, ignore_eos=True))
    core.step()
    assert rows(runner) == [(0, 0, 3)]
    core.step()
    assert rows(runner) == [(0, 3, 1), (1, 0, 20)]


def test_priority_then_arrival():
    core, runner = make_core(max_num_seqs=1)
    for request_id, priority in ((0, 0), (1, 0), (2, -1), (3, 1)):
        core.submit(make_submit(request_id, [1], max_tokens=1, priority=priority, arrival_s=float(request_id)))
    run(core)
    assert [plan.rows[0].request_id for plan in runner.plans] == [2, 0, 1, 3]


def test_max_num_seqs_bounds_what_runs():
    core, runner = make_core(max_num_seqs=2)
    for request_id in range(3):
        core.submit(make_submit(request_id, [1], max_tokens=3, ignore_eos=True))
    core.step()
    assert [row[0] for row in rows(runner)] == [0, 1]
    assert core.stats().num_waiting == 1


def test_the_newest_of_the_lowest_priority_is_preempted_and_comes_back_first():
    core, _ = make_core(num_blocks=4, block_size=4, prefix_caching=False)
    prompts = {0: [1] * 3, 1: [2] * 3, 2: [3] * 3}
    for request_id, priority in ((0, 0), (1, 1), (2, 0)):
        arrival = float(request_id)
        core.submit(
            make_submit(
                request_id, prompts[request_id], max_tokens=8, ignore_eos=True, priority=priority, arrival_s=arrival
            )
        )
    preempted = []
    outputs: dict[int, list[int]] = {}
    while core.has_work:
        before = {r.request_id for r in core.scheduler.running}
        report = core.step()
        for event in report.events:
            if isinstance(event, TokensOut):
                outputs.setdefault(event.request_id, []).extend(event.token_ids)
        preempted += [r.request_id for r in core.scheduler.waiting if r.request_id in before]
        core.check_integrity()
    assert preempted[0] == 1
    assert 0 not in preempted
    assert outputs == {i: expected_output(prompt, 8, frozenset()) for i, prompt in prompts.items()}


def test_nothing_is_admitted_in_a_step_that_preempted():
    core, runner = make_core(num_blocks=3, block_size=4, prefix_caching=False)
    core.submit(make_submit(0, [1] * 4, max_tokens=8, ignore_eos=True))
    core.submit(make_submit(1, [2] * 4, max_tokens=8, ignore_eos=True, arrival_s=1.0))
    core.step()
    report = core.step()
    assert report.stats is not None
    assert report.stats.num_preempted == 1
    assert rows(runner) == [(0, 4, 1)]
    assert run(core)[1] == expected_output([2] * 4, 8, frozenset())[1:]


def test_choices_of_one_prompt_compute_it_once():
    core, runner = make_core(max_num_batched_tokens=32)
    for request_id in range(3):
        core.submit(make_submit(request_id, [1] * 10))
    report = core.step()
    assert rows(runner) == [(0, 0, 10), (1, 8, 2), (2, 8, 2)]
    assert report.stats is not None
    assert (report.stats.num_prefix_queries, report.stats.num_prefix_hits) == (30, 16)


def test_a_failed_row_fails_alone_and_its_blocks_are_not_reused_as_prefix():
    core, runner = make_core()
    runner.poisoned.add(0)
    core.submit(make_submit(0, [1] * 9))
    core.submit(make_submit(1, [2] * 9, max_tokens=2, ignore_eos=True))
    failed = [event for event in core.step().events if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == [0]
    assert "not finite" in str(failed[0].error)
    core.submit(make_submit(2, [1] * 9, max_tokens=1))
    core.step()
    assert (2, 0, 9) in rows(runner)


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_abort_frees_everything_at_once(when: str):
    core, _ = make_core(max_num_seqs=1, max_num_batched_tokens=4)
    core.submit(make_submit(0, [1] * 6, max_tokens=20, ignore_eos=True))
    for _ in range({"waiting": 0, "prefill": 1, "decode": 3}[when]):
        core.step()
    core.abort(Abort(0))
    (event,) = core.flush().events
    assert event.request_id == 0
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert not core.has_work


def test_a_request_that_cannot_fit_fails_by_name():
    core, _ = make_core(num_blocks=4, block_size=4)
    core.submit(make_submit(0, [1] * 12, max_tokens=5))
    (event,) = core.flush().events
    assert isinstance(event, Failed)
    assert "12 tokens and max_tokens is 5" in str(event.error)
    assert not core.has_work


def test_max_tokens_none_runs_to_the_context():
    core, _ = make_core(num_blocks=4, block_size=4)
    core.submit(make_submit(0, [1] * 3, max_tokens=None, ignore_eos=True))
    assert len(run(core)[0]) == 13


def targets(runner: FakeRunner) -> list[tuple[int, range]]:
    """The prompt positions that the last plan scores, by request."""
    return [(row.request_id, row.scoring.targets) for row in runner.plans[-1].rows if row.scoring is not None]


def test_a_prompt_is_scored_chunk_by_chunk_from_its_second_token():
    core, runner = make_core(max_num_batched_tokens=4)
    core.submit(make_submit(0, [1] * 9, prompt_logprobs=2))
    seen = []
    for _ in range(4):
        core.step()
        seen += targets(runner)
    assert seen == [(0, range(1, 5)), (0, range(5, 9))]  # the third chunk, position 8 alone, is for the output


def test_a_scored_prompt_is_computed_whole_but_its_blocks_are_shared():
    core, runner = make_core()
    for request_id, params in enumerate(({}, {"prompt_logprobs": 0}, {})):
        core.submit(make_submit(request_id, [1] * 12, max_tokens=1, **params))
        core.step()
    starts = [plan.rows[0].start for plan in runner.plans]
    assert starts == [0, 0, 8]


def test_a_step_scores_no_more_than_its_share(monkeypatch):
    monkeypatch.setattr("engine.scheduler.MAX_SCORED_TOKENS", 5)
    core, runner = make_core(num_blocks=32)
    core.submit(make_submit(0, [1] * 7, max_tokens=1, prompt_logprobs=0))
    core.submit(make_submit(1, [2] * 4, max_tokens=1, prompt_logprobs=0))
    core.submit(make_submit(2, [3] * 6, max_tokens=1))
    core.step()
    assert rows(runner) == [(0, 0, 5)]  # those behind wait their turn
    core.step()
    assert rows(runner) == [(0, 5, 2), (1, 0, 4), (2, 0, 6)]
    assert run(core) == {}


def test_a_request_for_no_tokens_ends_when_its_prompt_is_computed():
    core, runner = make_core(max_num_batched_tokens=4)
    core.submit(make_submit(0, [1] * 6, max_tokens=0, prompt_logprobs=0))
    assert len(core.step().events) == 1
    scores, end = core.step().events
    assert isinstance(scores, TokensOut)
    assert (scores.token_ids, len(scores.prompt_logprobs)) == ((), 1)
    assert isinstance(end, Finished)
    assert (end.reason, end.num_output_tokens, end.timings.first_token_s) == (FinishReason.LENGTH, 0, None)
    assert not any(row.sampling for plan in runner.plans for row in plan.rows)
    assert not core.has_work


def test_a_prompt_that_fills_the_context_may_still_be_scored():
    core, _ = make_core(num_blocks=4)
    core.submit(make_submit(0, [1] * 16, max_tokens=0, prompt_logprobs=0))
    core.submit(make_submit(1, [1] * 16, max_tokens=1))
    events = core.step().events
    assert [type(event) for event in events] == [Failed, TokensOut, Finished]
