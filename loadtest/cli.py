"""Puts a load on a server that speaks OpenAI's API, and prints what it did."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from loadtest.client import ServerUnusable
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
from loadtest.runner import ClosedLoop, OpenLoop
from loadtest.target import Target
from loadtest.view import summary_tables

EXIT_FAILED_REQUESTS = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130
WARMUP_SEED = 24301  # added to the load's seed: the prefix cache must not know the measured prompts from the warm-up


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status: 1 when requests failed, 2 when the server cannot be used."""
    parser = make_parser()
    options = parser.parse_args(argv)
    target = read_target(parser, options, options.url)
    try:
        return run_async(_run(target, options))
    except ServerUnusable as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The options of `python -m loadtest`."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    parser.add_argument("--model", help="by default the first that the server lists")
    parser.add_argument("-n", "--num-requests", type=positive, default=64, metavar="N", help="(%(default)s)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "-c", "--concurrency", type=positive, default=16, metavar="N", help="clients in a closed loop (%(default)s)"
    )
    pace.add_argument("--rate", type=positive_float, metavar="R", help="open loop instead: R requests a second")
    parser.add_argument(
        "--warmup", type=not_negative, default=0, metavar="N", help="requests to send before the measured ones"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    add_load_options(parser)
    add_connection_options(parser)
    return parser


async def _run(target: Target, options: argparse.Namespace) -> int:
    server = await Server.ask(target, options.model)
    spec = load_spec(options, num_requests=options.num_requests)
    pace = OpenLoop(options.rate, spec.seed) if options.rate else ClosedLoop(options.concurrency)
    if options.warmup:
        warmup = replace(spec, seed=spec.seed + WARMUP_SEED, num_requests=options.warmup)
        await measure(server, warmup, pace, timeout_s=options.timeout)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    summary = await measure(server, spec, pace, timeout_s=options.timeout)

    console = Console()
    console.print(f"{target.url}{spec.path}  {server.model}", highlight=False)
    for table in summary_tables(summary):
        console.print(table)
    if summary.num_cached_tokens and not spec.shared_prefix_len:
        console.print("The server has seen part of these prompts before: take another --seed for a fair figure.")
    if options.json:
        document = {
            "started_at": started_at,
            "server": server.to_json(),
            "load": asdict(spec),
            "pace": asdict(pace),
            "warmup": options.warmup,
            "timeout_s": options.timeout,
            "results": summary.to_json(),
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return EXIT_FAILED_REQUESTS if summary.num_failed else 0
