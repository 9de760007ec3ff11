"""Compares two servers under the same load, measured in turn: machines drift, so only ratios are results.

Both run already, or are started here (`--a-start`) and stopped at the end. Each round measures both at each
concurrency, one after the other; the order changes from round to round. Both get the same requests, and each round gets
new ones, so that no prefix cache has seen them before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from loadtest.cli import EXIT_FAILED_REQUESTS, EXIT_INTERRUPTED, EXIT_UNUSABLE
from loadtest.client import ServerUnusable
from loadtest.comparison import Cell, Side, itl_p50_ms, markdown, output_tokens_per_s, ttft_p50_ms
from loadtest.measure import Server, measure, run_async
from loadtest.options import (
    add_connection_options,
    add_load_options,
    load_spec,
    not_negative,
    positive,
    positive_float,
    read_target,
)
from loadtest.process import started
from loadtest.report import Summary
from loadtest.runner import ClosedLoop
from loadtest.target import Target
from loadtest.workload import LoadSpec


def in_turn(rounds: int, concurrencies: Sequence[int]) -> Iterator[tuple[int, int, tuple[Side, Side]]]:
    """(round, concurrency, order of the two sides): a goes first in even rounds, b in odd ones."""
    for number in range(rounds):
        for concurrency in concurrencies:
            yield number, concurrency, ("a", "b") if number % 2 == 0 else ("b", "a")


def round_spec(spec: LoadSpec, number: int, concurrency: int, *, per_client: int, at_least: int) -> LoadSpec:
    """The load of one cell in one round: the same for both sides, and like no other's."""
    seed = spec.seed + 100_003 * (number + 1) + concurrency
    return replace(spec, seed=seed, num_requests=max(at_least, per_client * concurrency))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status: 1 when requests failed, 2 when a server cannot be used."""
    parser = make_parser()
    options = parser.parse_args(argv)
    a, b = read_target(parser, options, options.a), read_target(parser, options, options.b)
    try:
        return run_async(_start_and_run(a, b, options))
    except ServerUnusable as error:
        print(f"loadtest.compare: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The options of `python -m loadtest.compare`."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.compare", description=__doc__)
    for side in ("a", "b"):
        group = parser.add_argument_group(f"server {side}")
        group.add_argument(f"--{side}", required=True, metavar="URL")
        group.add_argument(f"--{side}-name", default=side, metavar="NAME", help="in the tables (%(default)s)")
        group.add_argument(f"--{side}-model", metavar="MODEL", help="by default the first that the server lists")
        group.add_argument(
            f"--{side}-start", metavar="COMMAND", help="start it with this, as in `env A=1 program --flag`, and stop it"
        )
    parser.add_argument("-c", "--concurrency", type=positive, nargs="+", default=[1, 8, 32, 64], metavar="N")
    parser.add_argument("--rounds", type=positive, default=3, help="(%(default)s)")
    parser.add_argument(
        "--per-client", type=positive, default=3, metavar="N", help="requests for each client (%(default)s)"
    )
    parser.add_argument("--at-least", type=positive, default=8, metavar="N", help="... but this many (%(default)s)")
    parser.add_argument(
        "--warmup", type=not_negative, default=4, metavar="N", help="requests to each server before (%(default)s)"
    )
    parser.add_argument(
        "--start-timeout", type=positive_float, default=300.0, metavar="S", help="until it answers (%(default)s)"
    )
    parser.add_argument(
        "--log-dir", type=Path, default=Path("."), metavar="DIR", help="for the output of servers started here"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure of every round there")
    add_load_options(parser)
    add_connection_options(parser)
    return parser


async def _start_and_run(a: Target, b: Target, options: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that servers are stopped then, too
    first = replace(load_spec(options, num_requests=1), output_len=1)
    async with AsyncExitStack() as servers:
        for name, command, target in (
            (options.a_name, options.a_start, a),
            (options.b_name, options.b_start, b),
        ):
            if command:
                log = options.log_dir / f"{name}.log"
                print(f"starting {name}; its output goes to {log}", file=sys.stderr)
                await servers.enter_async_context(
                    started(command, target, first, log=log, timeout_s=options.start_timeout)
                )
        return await _run(a, b, options)


async def _run(a: Target, b: Target, options: argparse.Namespace) -> int:
    servers: dict[Side, Server] = {"a": await Server.ask(a, options.a_model), "b": await Server.ask(b, options.b_model)}
    spec = load_spec(options, num_requests=options.warmup)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    cells = {concurrency: Cell(concurrency) for concurrency in options.concurrency}
    console = Console()
    if options.warmup:
        for server in servers.values():
            await measure(server, spec, ClosedLoop(options.warmup), timeout_s=options.timeout)
    for number, concurrency, order in in_turn(options.rounds, options.concurrency):
        load = round_spec(spec, number, concurrency, per_client=options.per_client, at_least=options.at_least)
        for side in order:
            summary = await measure(servers[side], load, ClosedLoop(concurrency), timeout_s=options.timeout)
            if not summary.num_completed:
                raise ServerUnusable(f"no request to {servers[side].target.url} succeeded: {summary.errors}")
            cells[concurrency].side(side).append(summary)
            console.print(
                _line(number, concurrency, getattr(options, f"{side}_name"), summary), highlight=False, soft_wrap=True
            )
    console.print(markdown(cells.values(), options.a_name, options.b_name), highlight=False, soft_wrap=True)
    if options.json:
        document = {
            "started_at": started_at,
            "servers": {side: server.to_json() for side, server in servers.items()},
            "load": asdict(spec),
            "rounds": options.rounds,
            "cells": [cell.to_json() for cell in cells.values()],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return EXIT_FAILED_REQUESTS if any(cell.num_failed for cell in cells.values()) else 0


def _line(number: int, concurrency: int, name: str, summary: Summary) -> str:
    failed = f"  {summary.num_failed} FAILED: {', '.join(summary.errors)}" if summary.errors else ""
    return (
        f"round {number + 1}  c={concurrency:<3} {name:16} {output_tokens_per_s(summary):8.1f} tok/s  "
        f"ITL p50 {itl_p50_ms(summary):7.1f} ms  TTFT p50 {ttft_p50_ms(summary):8.1f} ms{failed}"
    )


if __name__ == "__main__":
    sys.exit(main())
