"""All linear layers of a model, one after the other as a step runs them: `python -m tests.benchmarks.linear`.

Weights are random, with the shapes of SmolLM2-135M: each layer has its own, so that none is in a cache by chance. The
figures are the best of some runs, since what else the machine does can only make them worse. GB/s is what is read of
the weights; GFLOP/s is what is computed.

`--against DIR` runs another build of the kernels (a folder with a `_kernels*.so`) in turn with this one, call by call.
Both must give the same, bit for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.kernels.cpu.library import Call, kernel_table, library, variants
from engine.kernels.cpu.linear import PackedLinear, pack_gated, pack_linear
from tests.benchmarks.builds import OWN, build_at

HIDDEN, INNER, KEY_VALUE, NUM_LAYERS, VOCABULARY = 576, 1536, 192, 30, 49152
TYPES = {"float32": (torch.float32, False), "bfloat16": (torch.bfloat16, False), "int8": (torch.bfloat16, True)}


def layers(dtype: torch.dtype, *, int8: bool, variant: str | None) -> list[PackedLinear]:
    """Those of all decoder layers, then the one that makes logits."""

    def random(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, dtype=dtype) * inputs**-0.5

    def plain(outputs: int, inputs: int) -> PackedLinear:
        return pack_linear([random(outputs, inputs)], [None], int8=int8, variant=variant)

    def gated() -> PackedLinear:
        weights = random(INNER, HIDDEN), random(INNER, HIDDEN)
        return pack_gated(weights, (None, None), "silu", int8=int8, variant=variant)

    of_a_layer = (
        lambda: plain(HIDDEN + 2 * KEY_VALUE, HIDDEN),
        lambda: plain(HIDDEN, HIDDEN),
        gated,
        lambda: plain(HIDDEN, INNER),
    )
    return [make() for _ in range(NUM_LAYERS) for make in of_a_layer] + [plain(VOCABULARY, HIDDEN)]


@dataclass(frozen=True)
class Build:
    """A build of the C library, and its kernel for linear layers."""

    run: Callable[[int, int, int], None]
    linear: int

    @classmethod
    def at(cls, directory: Path, dtype: torch.dtype, variant: str | None) -> Build:
        """That in a folder."""
        with build_at(directory):
            return cls(library().cl_run, kernel_table(dtype, variant).linear)


def seconds(chain: list[PackedLinear], rows: int, builds: list[Build], *, runs: int, num_threads: int) -> list[float]:
    """The best time of all layers with each build, each layer on `rows` rows of random numbers."""
    num_rows = ctypes.c_int64(rows)
    dtype = chain[0].dtype
    x = torch.randn(rows, max(layer.in_features for layer in chain), dtype=dtype)
    out = torch.empty(rows, max(layer.out_features for layer in chain), dtype=dtype)
    arguments = [layer.arguments() for layer in chain]
    for args, following in zip(arguments, [*arguments[1:], None], strict=True):
        args.num_rows = ctypes.addressof(num_rows)
        args.x, args.x_stride = x.data_ptr(), x.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.next = None if following is None else ctypes.addressof(following)
    lists = [
        (Call * len(chain))(*(Call(build.linear, ctypes.addressof(args)) for args in arguments)) for build in builds
    ]
    best = [float("inf")] * len(builds)
    first = None
    for _ in range(runs):
        for i, (build, calls) in enumerate(zip(builds, lists, strict=True)):
            started = time.perf_counter()
            build.run(ctypes.addressof(calls), len(calls), num_threads)
            best[i] = min(best[i], time.perf_counter() - started)
            first = out.clone() if first is None else first
            assert torch.equal(out, first), "not the same"
    return best


def main() -> None:
    """Measure, and print a line for each type and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 256, 512])
    parser.add_argument("--variant", choices=variants(), default=None, help="instruction set; the fastest by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another build, run in turn with this one")
    args = parser.parse_args()
    print(f"{args.variant or variants()[0]}, {args.threads} threads")
    print(
        f"{'type':10}{'rows':>6}{'ms':>9}{'GB/s':>8}{'GFLOP/s':>10}"
        + (f"{'other ms':>10}{'ratio':>7}" * bool(args.against))
    )
    directories = [OWN, *([args.against] if args.against else [])]
    for name in args.types:
        dtype, int8 = TYPES[name]
        builds = [Build.at(directory, dtype, args.variant) for directory in directories]
        chain = layers(dtype, int8=int8, variant=args.variant)
        num_bytes = sum(layer.weight.nbytes for layer in chain)
        num_weights = sum(layer.weight.numel() for layer in chain)
        for rows in args.rows:
            best, *others = seconds(chain, rows, builds, runs=args.runs, num_threads=args.threads)
            flops = 2 * num_weights * rows
            line = f"{name:10}{rows:6}{1e3 * best:9.2f}{num_bytes / best / 1e9:8.1f}{flops / best / 1e9:10.1f}"
            print(line + "".join(f"{1e3 * other:10.2f}{best / other:7.3f}" for other in others))


if __name__ == "__main__":
    main()
