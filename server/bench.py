"""What `chairlift bench` prints: a table for each kind of measurement, and the same figures as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from engine.bench.load import LoadRun
from engine.bench.steps import Decode, Prefill
from engine.bench.suite import Results
from engine.core import ModelInfo


def headline(info: ModelInfo) -> str:
    """What was measured."""
    cache = "" if info.kv_cache_dtype == info.dtype else f", KV cache in {info.kv_cache_dtype}"
    size = f"{info.num_parameters / 1e6:,.1f} M parameters"
    return f"{info.name}: {size}, {info.dtype}, {info.device}, {info.kernels}{cache}"


def tables(results: Results) -> Iterator[tuple[str, Table]]:
    """A title and a table for each kind of measurement that was made."""
    if results.prefill:
        yield "Prefill, one prompt at a time", _prefill_table(results.prefill)
    if results.decode:
        yield "Decode steps, parts in ms", _decode_table(results.decode)
    if results.continuous:
        yield "A load of requests", _load_table(results.continuous, results.static)


def _prefill_table(runs: Iterable[Prefill]) -> Table:
    """Prompts, one at a time."""
    table = _table("prompt tokens", "ms", "tok/s")
    for run in runs:
        table.add_row(f"{run.num_tokens:,}", _ms(run.seconds), f"{run.tokens_per_s:,.0f}")
    return table


def _decode_table(runs: Sequence[Decode]) -> Table:
    """Steps by number of rows, with their parts."""
    parts = list(dict.fromkeys(name for run in runs for name in run.parts_s))
    heads = ("rows", "context", "step ms", "tok/s", "roofline ms", "share", "read GB/s", *parts)
    table = _table(*heads)
    for run in runs:
        table.add_row(
            str(run.num_rows),
            f"{run.context_len:,}",
            _ms(run.step_s),
            f"{run.tokens_per_s:,.0f}",
            _ms(run.roofline_s),
            f"{run.roofline_share:.0%}",
            f"{run.bandwidth / 1e9:.1f}",
            *(_ms(run.parts_s[name]) if name in run.parts_s else "" for name in parts),
        )
    return table


def _load_table(continuous: Iterable[LoadRun], static: Iterable[LoadRun]) -> Table:
    """Closed loops; a static run stands below the continuous one of its concurrency, with how many times it takes."""
    heads = ("open at once", "batching", "requests", "output tok/s", "all tok/s", "TTFT p50 ms", "ITL p50 ms", "time")
    table = _table(*heads)
    waves = {run.concurrency: run for run in static}
    for run in continuous:
        table.add_row(*_load_cells(run, "continuous", "1"))
        if run.concurrency in waves:
            wave = waves[run.concurrency]
            table.add_row(*_load_cells(wave, "static", f"x {wave.seconds / run.seconds:.1f}"))
    return table


def to_json(results: Results) -> dict[str, Any]:
    """All figures, times in seconds."""
    names = ("name", "dtype", "device", "kernels", "num_parameters")
    return {
        "engine": {name: getattr(results.info, name) for name in names},
        "prefill": [_with(run, "tokens_per_s") for run in results.prefill],
        "decode": [_with(run, "tokens_per_s", "roofline_s", "roofline_share") for run in results.decode],
        "load": [_with(run, "output_tokens_per_s", "total_tokens_per_s") for run in results.continuous],
        "static": [_with(run, "output_tokens_per_s", "total_tokens_per_s") for run in results.static],
    }


def _load_cells(run: LoadRun, batching: str, time: str) -> tuple[str, ...]:
    return (
        str(run.concurrency),
        batching,
        str(run.num_requests),
        f"{run.output_tokens_per_s:,.1f}",
        f"{run.total_tokens_per_s:,.1f}",
        "-" if run.ttft_p50_s is None else _ms(run.ttft_p50_s),
        "-" if run.itl_p50_s is None else _ms(run.itl_p50_s),
        time,
    )


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.{2 if seconds < 0.001 else 1}f}"


def _with(run: Prefill | Decode | LoadRun, *properties: str) -> dict[str, Any]:
    return asdict(run) | {name: getattr(run, name) for name in properties}
