"""What a narrower KV cache costs in quality, on the default model: `python -m tests.benchmarks.kv_cache DTYPE [file]`.

Texts (by default the maintainers' pages of this repository) are cut into windows of 1024 tokens. The distributions of
each window's next tokens, over a cache of the model's own type and over each narrower one, give perplexity, mean KL
divergence and how often the likeliest token is the same. Then prompts from the same texts are continued greedily over
each. Results belong in `loadtest/RESULTS.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config.schema import DType, ModelConfig
from engine.bench.requests import Request, run_all
from engine.core import EngineCore
from engine.kv.storage import KVCapacity, KVStorage
from engine.messages import TokensOut
from engine.model.batch import pack_step
from engine.model.loader import LoadedModel, load_model
from engine.model.resolve import resolve_model
from engine.plan import PlanRow, StepPlan
from engine.text.tokenizer import Tokenizer
from tests.integration.oracle import make_core

TEXTS = ("engine/README.md", "server/README.md")
WINDOW, BLOCK_SIZE = 1024, 32
MAX_WINDOWS = 4
CHUNK = 256
NUM_PROMPTS, PROMPT_LEN, OUTPUT_LEN = 32, 64, 64


def log_probs(loaded: LoadedModel, tokens: Sequence[int], cache_dtype: torch.dtype) -> Tensor:
    """float32 [tokens, vocabulary], computed in chunks: most of what is attended to comes from the cache anyway."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    specs = [layer.spec for layer in loaded.layers]
    capacity = KVCapacity(num_blocks, BLOCK_SIZE)
    storage = KVStorage.allocate(specs, capacity, cache_dtype, loaded.device, loaded.kernels.empty_cache)
    chunks = []
    for start in range(0, len(tokens), CHUNK):
        row = PlanRow(0, tokens[start : start + CHUNK], start, range(num_blocks), None)
        step = pack_step(StepPlan((row,)), BLOCK_SIZE).with_all_logits()
        chunks.append(F.log_softmax(loaded.forward(step, storage).float(), dim=-1))
    return torch.cat(chunks)


def greedy(core: EngineCore, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The prompts' continuations, all decoded together."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for report, _ in run_all(core, [Request(tuple(prompt), OUTPUT_LEN) for prompt in prompts]):
        for event in report.events:
            if isinstance(event, TokensOut):
                outputs[event.request_id] += event.token_ids
    return outputs


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def compare(loaded: LoadedModel, windows: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> None:
    """Print a line for each type of the cache."""
    own, *narrower = loaded.kernels.cache_dtypes(loaded.dtype)
    figures: dict[torch.dtype, list[tuple[float, float, float]]] = {kind: [] for kind in (own, *narrower)}
    for tokens in windows:
        exact = log_probs(loaded, tokens, own)
        targets = torch.tensor(tokens[1:])
        for kind, found in figures.items():
            other = exact if kind == own else log_probs(loaded, tokens, kind)
            loss = F.nll_loss(other[:-1], targets).item()
            divergence = (exact.exp() * (exact - other)).sum(-1).mean().item()
            found.append((loss, divergence, (exact.argmax(-1) == other.argmax(-1)).float().mean().item()))
    continued = {}
    for kind in figures:
        num_blocks = NUM_PROMPTS * -(-(PROMPT_LEN + OUTPUT_LEN) // BLOCK_SIZE)
        core = make_core(
            loaded, block_size=BLOCK_SIZE, num_blocks=num_blocks, cache_dtype=kind, max_num_seqs=NUM_PROMPTS
        )
        continued[kind] = greedy(core, prompts)
    for kind, found in figures.items():
        loss, divergence, same = (mean(column) for column in zip(*found, strict=True))
        lengths = [common(a, b) for a, b in zip(continued[own], continued[kind], strict=True)]
        alike = sum(length == OUTPUT_LEN for length in lengths)
        print(
            f"{_name(loaded.dtype):9} {_name(kind):9} {np.exp(loss):10.3f} {divergence:9.1e} {same:9.1%} "
            f"{alike:6} of {len(lengths)} {mean(lengths):11.1f} of {OUTPUT_LEN}",
            flush=True,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Print a table."""
    path = resolve_model("smollm2")
    tokenizer = Tokenizer.load(path)
    windows = []
    for name in sys.argv[2:] or TEXTS:
        tokens = tokenizer.encode(Path(name).read_text())
        windows += [tokens[start : start + WINDOW] for start in range(0, len(tokens) - WINDOW, WINDOW)]
    windows = windows[:MAX_WINDOWS]
    starts = np.linspace(0, WINDOW - PROMPT_LEN, -(-NUM_PROMPTS // len(windows))).astype(int)
    prompts = [window[start : start + PROMPT_LEN] for window in windows for start in starts][:NUM_PROMPTS]
    print(f"{len(windows)} windows of {WINDOW} tokens; {len(prompts)} prompts of {PROMPT_LEN}")
    print("model     cache     perplexity KL, nats likeliest  same output     same tokens at first")
    config = ModelConfig(dtype=cast(DType, sys.argv[1]), device="cpu", kernels="cpu")
    compare(load_model(path, config, block_size=BLOCK_SIZE), windows, prompts)


if __name__ == "__main__":
    main()
