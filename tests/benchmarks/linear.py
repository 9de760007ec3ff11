"""All linear layers of a model, one after the other as a step runs them: `python -m tests.benchmarks.linear`.

Weights are random, with the shapes of SmolLM2-135M: each layer has its own, so that none is in a cache by chance. The
figures are the best of some runs, since what else the machine does can only make them worse. GB/s is what is read of
the weights; GFLOP/s is what is computed.
"""

from __future__ import annotations

import argparse
import ctypes
import time

import torch

from engine.kernels.cpu.library import Call, library, variants
from engine.kernels.cpu.linear import PackedLinear, pack_gated, pack_linear

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


def seconds(chain: list[PackedLinear], rows: int, *, runs: int, num_threads: int) -> float:
    """The best time of all layers, each on `rows` rows of random numbers."""
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
    calls = (Call * len(chain))(
        *(Call(layer.kernel, ctypes.addressof(args)) for layer, args in zip(chain, arguments, strict=True))
    )
    best = float("inf")
    for _ in range(runs):
        started = time.perf_counter()
        library().cl_run(ctypes.addressof(calls), len(calls), num_threads)
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    """Measure, and print a line for each type and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 256, 512])
    parser.add_argument("--variant", choices=variants(), default=None, help="instruction set; the fastest by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    print(f"{args.variant or variants()[0]}, {args.threads} threads")
    print(f"{'type':10}{'rows':>6}{'ms':>9}{'GB/s':>8}{'GFLOP/s':>10}")
    for name in args.types:
        dtype, int8 = TYPES[name]
        chain = layers(dtype, int8=int8, variant=args.variant)
        num_bytes = sum(layer.weight.nbytes for layer in chain)
        num_weights = sum(layer.weight.numel() for layer in chain)
        for rows in args.rows:
            best = seconds(chain, rows, runs=args.runs, num_threads=args.threads)
            flops = 2 * num_weights * rows
            print(f"{name:10}{rows:6}{1e3 * best:9.2f}{num_bytes / best / 1e9:8.1f}{flops / best / 1e9:10.1f}")


if __name__ == "__main__":
    main()
