"""What is shown while a run goes on, and after it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadtest.client import Counters
from loadtest.record import Failure, RequestRecord
from loadtest.report import summarize
from loadtest.runner import RunResult
from loadtest.view import RecentRate, live_line, progress, summary_tables


def test_progress_names_failures_only_when_there_are_some() -> None:
    counters = Counters(num_running=3, num_done=7, num_chunks=100)
    assert progress(counters, 20, 123.44) == "  123.4 tokens/s  3 running  7/20 done"
    counters.num_failed = 2
    assert progress(counters, 20, 123.44).endswith("7/20 done  2 failed")


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = RecentRate()
    assert rate.of(0, now_s=0.0) == 0.0
    assert rate.of(10, now_s=1.0) == 10.0
    for second in range(2, 10):
        shown = rate.of(10 + 100 * (second - 1), now_s=float(second))
    assert shown == 100.0


@pytest.mark.anyio
async def test_the_live_line_is_for_terminals() -> None:
    pipe, terminal = io.StringIO(), io.StringIO()
    for file in (pipe, terminal):
        async with live_line(Console(file=file, force_terminal=file is terminal), Counters(num_done=4), 9):
            pass
    assert pipe.getvalue() == ""
    assert "4/9 done" in terminal.getvalue()


def test_tables_show_figures_and_errors() -> None:
    good = RequestRecord(started_s=0.0, finished_s=2.0, chunk_times_s=[0.5, 1.0], num_output_tokens=2)
    bad = RequestRecord(started_s=0.0, failure=Failure("http 503", "[busy]"))
    console = Console(file=io.StringIO(), width=120)
    for table in summary_tables(summarize(RunResult([good, bad], duration_s=4.0, client_cpu_s=0.1))):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for text in ("500.0", "1 of 2", "http 503", "[busy]", "2.5%", "counted by chunks"):
        assert text in shown
