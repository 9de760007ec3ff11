"""What sampling costs beside the forward pass, on the default model: `python -m tests.benchmarks.sampling [rows]`.

Each mix runs as many requests as there are rows, all decoding, and reports the medians of its steps' own figures
(`StepStats`). Results belong in `loadtest/RESULTS.md`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from config.schema import EngineConfig, SchedulerConfig
from engine.build import build_engine
from engine.core import EngineCore
from engine.messages import Submit
from engine.params import SamplingParams

TEXT = (
    "The first chairlift was built in Sun Valley, Idaho, in 1936, by an engineer who had seen how bananas were loaded "
    "onto ships. Before it, skiers climbed on foot, or were pulled up the slope by a rope that tired their arms. The "
    "new lift carried them in single chairs on a moving cable that never stopped: people sat down as a chair "
    "came by, and got off at the top. Others said that nobody would dare to sit in a chair high above the snow. They "
    "were wrong. Within twenty years there was a lift in almost every mountain town, and the idea had spread to Europe "
    "and Japan. Today "
)
"""What all prompts begin with, so that their prefill is short. Prose: what sampling costs depends on how sure the model
is of the next word."""
ENDINGS = ("the", "people", "most of", "in summer", "a ticket", "engineers", "skiers who", "every child")
NUM_STEPS = 24
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
MIXED: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.8, "top_p": 0.95, **PENALTIES},
    {"temperature": 0, "repetition_penalty": 1.1, "logit_bias": {7: -100, 8: 3.0}},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_tokens": NUM_STEPS},
)
MIXES: dict[str, Sequence[dict[str, Any]]] = {
    "greedy": MIXED[:1],
    "temperature": MIXED[1:2],
    "top_p": MIXED[2:3],
    "all penalties": MIXED[5:6],
    "mixed": MIXED,
    "mixed, 5 logprobs each": [params | {"logprobs": 5} for params in MIXED],
}


def measure(
    core: EngineCore, prompts: Sequence[Sequence[int]], all_params: Sequence[dict[str, Any]], first_id: int
) -> tuple[float, float]:
    """Medians of forward and sampling time, in milliseconds, of steps in which all prompts decode."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True, seed=i, **all_params[i % len(all_params)])
        core.submit(Submit(first_id + i, tuple(prompt), params))
    forward_ms, sample_ms = [], []
    while core.has_work:
        stats = core.step().stats
        assert stats is not None
        if stats.num_sampled_tokens == stats.num_decode_tokens == len(prompts):
            forward_ms.append(1000 * stats.forward_s)
            sample_ms.append(1000 * stats.sample_s)
    return statistics.median(forward_ms), statistics.median(sample_ms)


def main() -> None:
    """Print a table."""
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    core, tokenizer = build_engine(EngineConfig(scheduler=SchedulerConfig(max_num_seqs=num_rows)))
    info = core.info
    prompts = [tokenizer.encode(f"{TEXT}{i} {ENDINGS[i % len(ENDINGS)]}") for i in range(num_rows)]
    print(f"{info.name}, {info.dtype}, {info.kernels}; {num_rows} rows, vocabulary {info.vocab_size}")
    print(f"{'parameters':24} {'forward ms':>10} {'sampling ms':>11} {'share':>6}")
    for number, (name, all_params) in enumerate(MIXES.items()):
        forward_ms, sample_ms = measure(core, prompts, all_params, first_id=number * 1000)
        print(f"{name:24} {forward_ms:10.1f} {sample_ms:11.2f} {sample_ms / forward_ms:6.0%}")


if __name__ == "__main__":
    main()
