"""What a run looks like in a terminal: a live line while it runs, a table when it is done."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadtest.client import Counters
from loadtest.report import Quantiles, Summary

REFRESH_S = 0.5
RATE_WINDOW_S = 3.0


@asynccontextmanager
async def live_line(console: Console, counters: Counters, num_requests: int) -> AsyncIterator[None]:
    """Show `counters` as they change; nothing when the console is no terminal."""
    if not console.is_terminal:
        yield
        return
    rate = RecentRate()
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show() -> None:
            line = progress(counters, num_requests, rate.of(counters.num_chunks, time.monotonic()))
            live.update(Text(line), refresh=True)

        async def keep_showing() -> None:
            while True:
                await asyncio.sleep(REFRESH_S)
                show()

        show()
        task = asyncio.create_task(keep_showing())
        try:
            yield
        finally:
            task.cancel()


class RecentRate:
    """How fast a count has grown in the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, count: int, now_s: float) -> float:
        """Note `count`; growth per second over the window that ends now."""
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()
        then_s, then_count = self._seen[0]
        return (count - then_count) / (now_s - then_s) if now_s > then_s else 0.0


def progress(counters: Counters, num_requests: int, chunks_per_s: float) -> str:
    """The live line."""
    failed = f"  {counters.num_failed} failed" if counters.num_failed else ""
    done = f"{counters.num_done}/{num_requests} done"
    return f"{chunks_per_s:7.1f} tokens/s  {counters.num_running} running  {done}{failed}"


def summary_tables(summary: Summary) -> list[Table]:
    """The figures of one run: times, counts and rates, and the errors if there are any."""
    tables = [_times(summary), _rates(summary)]
    return [*tables, _errors(summary)] if summary.errors else tables


def _times(summary: Summary) -> Table:
    table = Table("ms")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    rows = {
        "time to first token (TTFT)": summary.ttft_s,
        "between chunks (ITL)": summary.itl_s,
        "per later token (TPOT)": summary.tpot_s,
        "whole request (E2E)": summary.e2e_s,
    }
    for label, times in rows.items():
        table.add_row(label, *_in_ms(times))
    return table


def _in_ms(times: Quantiles | None) -> list[str]:
    if times is None:
        return ["-"] * 5
    return [f"{1000 * value:.1f}" for value in (times.mean, times.p50, times.p90, times.p99, times.max)]


def _rates(summary: Summary) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("output tokens/s", f"{summary.output_tokens_per_s:.1f}")
    total = summary.total_tokens_per_s
    table.add_row("prompt and output tokens/s", "-" if total is None else f"{total:.1f}")
    table.add_row("requests/s", f"{summary.requests_per_s:.2f}")
    table.add_row("requests completed", f"{summary.num_completed} of {summary.num_requests}")
    table.add_row(f"output tokens (counted by {summary.tokens_counted_by})", str(summary.num_output_tokens))
    table.add_row("... in chunks", str(summary.num_chunks))
    prompt = "-" if summary.num_prompt_tokens is None else str(summary.num_prompt_tokens)
    table.add_row("prompt tokens", prompt)
    table.add_row("... from the prefix cache", str(summary.num_cached_tokens))
    table.add_row("seconds", f"{summary.duration_s:.2f}")
    table.add_row("this client's share of a core", f"{summary.client_cpu_s / summary.duration_s:.1%}")
    return table


def _errors(summary: Summary) -> Table:
    table = Table("error", "requests", "after ms: p50", "p99", "the first one")
    for kind, error in sorted(summary.errors.items()):
        after_ms = (f"{1000 * value:.1f}" for value in (error.after_s.p50, error.after_s.p99))
        table.add_row(kind, str(error.count), *after_ms, Text(error.example))
    return table
