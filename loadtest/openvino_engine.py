"""OpenVINO GenAI's continuous batching without HTTP, on the loads of `chairlift bench load`: the same requests.

Run it with the Python that has openvino-genai: `python -m loadtest.openvino_engine MODEL_DIR -c 1 32 --json FILE`.
MODEL_DIR is what `optimum-cli export openvino` has made.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.options import positive
from loadtest.workload import LoadSpec, make_jobs

MIN_REQUESTS = 8
KV_CACHE_GB = 4
MAX_BATCHED_TOKENS = 512


@dataclass(slots=True)
class Run:
    """What has come of a load so far."""

    num_output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Stream:
    """One open request."""

    handle: Any
    started: float
    last: float | None = None

    def read(self, run: Run, now: float) -> None:
        """Take what has been generated since the last step."""
        while self.handle.can_read():
            run.num_output_tokens += sum(len(output.generated_ids) for output in self.handle.read().values())
            if self.last is None:
                run.ttft_s.append(now - self.started)
            else:
                run.itl_s.append(now - self.last)
            self.last = now


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.openvino_engine", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("-c", "--concurrency", type=positive, nargs="+", default=[1, 8, 32, 64], metavar="N")
    parser.add_argument("--per-client", type=positive, default=3, metavar="N", help="requests each (%(default)s)")
    parser.add_argument("--input-len", type=positive, default=128, help="mean prompt tokens (%(default)s)")
    parser.add_argument("--output-len", type=positive, default=64, help="mean output tokens (%(default)s)")
    parser.add_argument("--precision", default="bf16", help="of products and KV cache (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    pipeline = load(options.model, max(options.concurrency), options.precision)
    spec = LoadSpec(num_requests=2, input_len=options.input_len, output_len=options.output_len, seed=options.seed - 1)
    run_load(pipeline, spec, 2)  # warms up
    results = []
    for concurrency in options.concurrency:
        num_requests = max(MIN_REQUESTS, options.per_client * concurrency)
        result = run_load(
            pipeline, replace(spec, num_requests=num_requests, seed=options.seed + concurrency), concurrency
        )
        print("  ".join(f"{name} {value:g}" for name, value in result.items()), flush=True)
        results.append(result)
    if options.json:
        options.json.write_text(json.dumps({"load": results}, indent=2) + "\n")
    return 0


def load(model: Path, max_num_seqs: int, precision: str) -> Any:
    """The pipeline, with the limits that Chairlift has by default."""
    import openvino_genai

    config = openvino_genai.SchedulerConfig()
    config.cache_size = KV_CACHE_GB
    config.max_num_batched_tokens = MAX_BATCHED_TOKENS
    config.max_num_seqs = max_num_seqs
    config.dynamic_split_fuse = True
    config.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    return openvino_genai.ContinuousBatchingPipeline(str(model), config, "CPU", properties)


def run_load(pipeline: Any, spec: LoadSpec, concurrency: int) -> dict[str, float]:
    """The requests of `spec`, `concurrency` open at a time: figures by the names that `chairlift bench --json` has."""
    import openvino_genai

    waiting = iter(enumerate(json.loads(job.body) for job in make_jobs(spec, "any")))
    running = openvino_genai.GenerationStatus.RUNNING
    run, streams = Run(), list[Stream]()
    started = time.perf_counter()
    while True:
        for _, (number, body) in zip(range(concurrency - len(streams)), waiting, strict=False):
            streams.append(Stream(_add(pipeline, number, body), time.perf_counter()))
        if not streams:
            break
        pipeline.step()
        now = time.perf_counter()
        for stream in streams:
            stream.read(run, now)
        streams = [stream for stream in streams if stream.handle.get_status() == running]
    seconds = time.perf_counter() - started
    return {
        "concurrency": concurrency,
        "num_requests": spec.num_requests,
        "num_output_tokens": run.num_output_tokens,
        "seconds": seconds,
        "output_tokens_per_s": run.num_output_tokens / seconds,
        "ttft_p50_s": median(run.ttft_s),
        "itl_p50_s": median(run.itl_s),
    }


def _add(pipeline: Any, number: int, body: dict[str, Any]) -> Any:
    import numpy as np
    import openvino
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = body["max_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    prompt = np.array([body["prompt"]], dtype=np.int64)
    return pipeline.add_request(number, openvino.Tensor(prompt), config)


if __name__ == "__main__":
    sys.exit(main())
