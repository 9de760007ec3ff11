"""What a decode step takes in C and around it: `python -m tests.benchmarks.decode_step`.

The engine is called offline, with the default model, so that nothing else runs. `--against DIR` runs the engine of
another checkout in turn with this one, each time in a process of its own. Of each, what is printed are the medians of
the runs' first quartiles: what disturbs a step only adds to it. Results belong in `loadtest/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARTS = ("step", "in C", "around it")


def measure(args: argparse.Namespace) -> list[float]:
    """First quartiles of PARTS in ms, with whatever `engine` is on the path."""
    import engine.core
    from engine import LLMEngine, SamplingParams
    from engine.kernels.cpu import decoder

    library, step = decoder.library, engine.core.EngineCore.step
    in_c_s = 0.0
    steps: list[tuple[float, float]] = []

    class Timed:
        """The C library, with a clock on the decoder's calls."""

        def __getattr__(self, name: str) -> Any:
            return getattr(library(), name)

        def cl_run(self, *call: Any) -> None:
            nonlocal in_c_s
            started = time.perf_counter()
            library().cl_run(*call)
            in_c_s += time.perf_counter() - started

    def timed_step(core: Any) -> Any:
        nonlocal in_c_s
        in_c_s, started = 0.0, time.perf_counter()
        report = step(core)
        if report.stats.num_prefill_tokens == 0:
            steps.append((time.perf_counter() - started, in_c_s))
        return report

    decoder.library = Timed
    engine.core.EngineCore.step = timed_step
    llm = LLMEngine(model="smollm2", quantization=args.quantization)
    prompts = [list(range(1000 + i, 1000 + i + args.context)) for i in range(args.rows)]
    params = SamplingParams(max_tokens=args.steps, ignore_eos=True, temperature=args.temperature)
    for _ in range(2):  # the first time to warm up
        steps.clear()
        llm.generate(prompts, params)
    columns = [whole for whole, _ in steps], [part for _, part in steps], [whole - part for whole, part in steps]
    return [1000 * statistics.quantiles(column, n=4)[0] for column in columns]


def measure_in(checkout: Path, argv: list[str]) -> list[float]:
    """The same in a process of its own, of the engine in a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, __file__, *argv, "--one"]
    answer = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, check=False)
    if answer.returncode:
        sys.exit(answer.stderr.decode())
    figures: list[float] = json.loads(answer.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Measure in turn, and print a line for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=100, help="tokens of the prompts")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, with its kernels built")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args)))
        return
    here = Path(__file__).parents[2]
    results: dict[Path, list[list[float]]] = {here: [], **({args.against.resolve(): []} if args.against else {})}
    for _ in range(args.rounds):
        for checkout, figures in results.items():
            figures.append(measure_in(checkout, sys.argv[1:]))
    print("ms".ljust(40) + "".join(f"{part:>12}" for part in PARTS))
    for checkout, figures in results.items():
        medians = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"{str(checkout)[-40:]:40}" + "".join(f"{median:12.2f}" for median in medians))


if __name__ == "__main__":
    main()
