"""What attention in C takes over each type of KV cache: `python -m tests.benchmarks.attention`.

Heads like SmolLM2's (9 over 3 key heads of 64), several layers so that caches are read from memory; types in turn,
and the best of some rounds, since what disturbs only adds. `--against DIR` runs another build of the kernels (a folder
with a `_kernels*.so`) in turn with this one. Results belong in `loadtest/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.kernels import AttentionOptions, PackedRows
from engine.kernels.cpu.attention import empty_cache, paged_attention, plan_attention, write_kv
from engine.kernels.cpu.library import cache_dtypes, kernel_table
from tests.benchmarks.builds import OWN, build_at

NUM_LAYERS, ROUNDS = 6, 9
NUM_HEADS, NUM_KV_HEADS, DIM, BLOCK_SIZE = 9, 3, 64, 32


def attention_over(
    dtype: torch.dtype, cache_dtype: torch.dtype, num_rows: int, context_len: int, num_queries: int
) -> Callable[[], None]:
    """A call that attends in all layers, for rows with so many tokens each."""
    blocks_each = -(-context_len // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(num_rows * blocks_each).reshape(num_rows, blocks_each)
    slots = torch.arange(tables.size * BLOCK_SIZE)
    numbers = torch.randn(len(slots), NUM_KV_HEADS, DIM).to(dtype)
    caches = [
        empty_cache(tables.size, BLOCK_SIZE, NUM_KV_HEADS, (DIM, DIM), dtype, cache_dtype) for _ in range(NUM_LAYERS)
    ]
    for cache in caches:
        write_kv(numbers, numbers, *cache, slots)
    starts = np.arange(num_rows + 1) * num_queries
    plan = plan_attention(PackedRows(starts, np.full(num_rows, context_len), tables, BLOCK_SIZE))
    query = torch.randn(num_rows * num_queries, NUM_HEADS, DIM).to(dtype)
    options = AttentionOptions(DIM**-0.5)

    def attend() -> None:
        for cache in caches:
            paged_attention(query, *cache, plan, options)

    return attend


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="that decode")
    parser.add_argument("--context", type=int, default=1000, help="tokens before and with those of the step")
    parser.add_argument("--queries", type=int, default=256, help="tokens of each of two rows of prompts")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another build, run in turn with this one")
    args = parser.parse_args()
    print(f"{kernel_table(torch.float32).variant}, {torch.get_num_threads()} threads; {args.context} tokens of context")
    directories = [OWN, *([args.against] if args.against else [])]
    for num_queries, rows in ((1, args.rows), (args.queries, 2)):
        print(f"{rows} rows of {num_queries}: ms a layer" + ", of the other build, ratio" * bool(args.against))
        calls = {
            (dtype, kind): attention_over(dtype, kind, rows, args.context, num_queries)
            for dtype in (torch.float32, torch.bfloat16)
            for kind in cache_dtypes(dtype)
        }
        best_s = {key: dict.fromkeys(directories, np.inf) for key in calls}
        for _ in range(ROUNDS):
            for key, call in calls.items():
                for directory in directories:
                    with build_at(directory):
                        started = time.perf_counter()
                        call()
                        best_s[key][directory] = min(best_s[key][directory], time.perf_counter() - started)
        for (dtype, kind), seconds in best_s.items():
            names = (str(each).removeprefix("torch.") for each in (dtype, kind))
            own, *others = seconds.values()
            line = "  {:9} in {:9}".format(*names) + f"{1000 * own / NUM_LAYERS:7.2f}"
            print(line + "".join(f"{1000 * other / NUM_LAYERS:7.2f}{own / other:7.3f}" for other in others))


if __name__ == "__main__":
    main()
