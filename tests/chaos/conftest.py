"""Every test in this folder is marked `chaos`; those that are not named here are `slow` as well."""

from __future__ import annotations

from pathlib import Path

import pytest

QUICK = {
    "test_a_client_leaves[in_the_queue-FIN-full]",
    "test_a_client_leaves[in_prefill-RST-stream]",
    "test_a_client_leaves[in_decode-FIN-stream]",
    "test_a_client_leaves[at_the_last_token-RST-full]",
    "test_scenario[two_hundred_leave_at_once]",
    "test_scenario[all_leave_in_their_bodies]",
    "test_scenario[a_reader_takes_its_time]",
    "test_scenario[an_observer_fails_once]",
    "test_a_fault_of_one_step_fails_nobody[launch-oom]",
    "test_a_prompt_that_cannot_be_computed_fails_alone[stream-collect]",
    "test_a_fault_of_a_request_is_its_own[detokenize-raise]",
    "test_a_fault_of_a_request_is_its_own[tokenize-raise]",
    "test_a_fault_of_the_engine_fails_everyone_and_shows[schedule:raise]",
    "test_a_cache_that_is_about_as_large_as_one_request[4--1]",
    "test_a_cache_that_is_about_as_large_as_one_request[4-0]",
    "test_the_wall_clock_jumps",
    "test_three_times_as_many_as_are_let_in",
}
"""One of each kind: some ten seconds together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.chaos)
            if item.name not in QUICK:
                item.add_marker(pytest.mark.slow)
