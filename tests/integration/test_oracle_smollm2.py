"""The default model in float32: greedy output equals transformers' `generate()`, token for token.

However requests arrive, whatever the chunk size, with prefix hits and with forced preemption.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.build import build_engine
from engine.core import EngineCore
from engine.kv.blocks import BlockPool
from engine.kv.manager import KVCacheManager
from engine.messages import StepStats, TokensOut
from engine.model.resolve import resolve_model
from engine.scheduler import Scheduler
from engine.text.tokenizer import Tokenizer
from tests.cpu_kernels import build_kernels
from tests.factories import make_submit

SLOW = pytest.mark.slow  # `test_logprobs.py` always takes these chunks, with tiny models
BOTH = ["cpu", pytest.param("reference", marks=SLOW)]
"""The torch kernels always take the prompts once, whole; `test_oracle_families.py` has them with tiny models."""
BLOCK_SIZES = {"reference": 8, "cpu": 16}
"""Small ones, so that prompts have several."""
MAX_TOKENS = 12
SYSTEM = "You are a careful assistant who answers in one short sentence. Question: "
PROMPTS = [
    "The",
    "The capital of France is",
    "Once upon a time, in a land far away, there lived a",
    "def fibonacci(n):\n    ",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
    "Water boils at",
    "Der schnelle braune Fuchs springt über",
    "东京是日本的首都。北京是",
    '{"name": "Ada", "born": 1815, "field":',
    "A B A B A B A B A B",
    "<|im_start|>user\nWho wrote Hamlet?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over",
    "SELECT name FROM users WHERE",
    "In 1969, the first humans landed on the Moon. They",
    "🙂 means",
    *(SYSTEM + question for question in ("What is rain?", "What is snow?", "Who was Bach?", "Why is the sky blue?")),
    SYSTEM + "What is rain?",
    "Roses are red,\nviolets are blue,\n",
    "To be, or not to be, that is",
    "The meaning of the word 'ephemeral' is",
]


@dataclass(frozen=True)
class Oracle:
    core: EngineCore
    block_size: int
    prompts: list[list[int]]
    expected: list[list[int]]

    def fresh_core(self, num_blocks: int = 400, **scheduler: object) -> EngineCore:
        """A core with empty caches over the same model."""
        pool = BlockPool(num_blocks)
        kv = KVCacheManager(pool, block_size=self.block_size, prefix_caching=True, secret=b"oracle")
        config = SchedulerConfig(**({"max_num_seqs": len(PROMPTS)} | scheduler))  # type: ignore[arg-type]
        return EngineCore(Scheduler(config, kv), self.core.runner, self.core.info)


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[list[int]]]:
    """The prompts, and what transformers makes of them."""
    from transformers import AutoModelForCausalLM

    path = resolve_model("smollm2")
    tokenizer = Tokenizer.load(path)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)
        outputs.append(output[0, len(prompt) :].tolist())
    return prompts, outputs


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, expected: tuple[list[list[int]], list[list[int]]]) -> Oracle:
    kernels = request.param
    if kernels == "cpu":
        build_kernels()
    block_size = BLOCK_SIZES[kernels]
    config = EngineConfig(
        model=ModelConfig(dtype="float32", device="cpu", max_model_len=512, kernels=kernels),
        cache=CacheConfig(block_size=block_size, kv_cache_tokens=4096),
    )
    core, _ = build_engine(config)
    return Oracle(core, block_size, *expected)


def run(oracle: Oracle, core: EngineCore, *, steps_between_arrivals: int) -> list[StepStats]:
    """Submit all prompts, one every so many steps; check every output; return the figures of all steps."""
    got: list[list[int]] = [[] for _ in oracle.prompts]
    stats: list[StepStats] = []
    arriving = list(enumerate(oracle.prompts))
    while arriving or core.has_work:
        if arriving and (len(stats) % max(steps_between_arrivals, 1) == 0 or not core.has_work):
            count = len(arriving) if steps_between_arrivals == 0 else 1
            for index, prompt in arriving[:count]:
                core.submit(make_submit(index, prompt, max_tokens=MAX_TOKENS, temperature=0.0, arrival_s=float(index)))
            del arriving[:count]
        report = core.step()
        assert report.stats is not None
        stats.append(report.stats)
        for event in report.events:
            if isinstance(event, TokensOut):
                got[event.request_id] += event.token_ids
        core.check_integrity()
    for prompt, output, expected in zip(PROMPTS, got, oracle.expected, strict=True):
        assert output == expected, prompt
    return stats


@pytest.mark.parametrize(
    ("oracle", "chunk"),
    [
        ("cpu", 7),
        ("cpu", 512),
        ("reference", 512),
        *(pytest.param("cpu", chunk, marks=SLOW) for chunk in (1, 32)),
        *(pytest.param("reference", chunk, marks=SLOW) for chunk in (1, 7, 32)),
    ],
    indirect=["oracle"],
)
def test_all_at_once(oracle: Oracle, chunk: int):
    stats = run(oracle, oracle.fresh_core(max_num_batched_tokens=chunk), steps_between_arrivals=0)
    assert max(each.num_rows for each in stats) >= max(1, min(chunk, 20) - 1)
    assert sum(each.num_prefix_hits for each in stats) > 0


@pytest.mark.parametrize("chunk", [pytest.param(7, marks=SLOW), 512])
@pytest.mark.parametrize("oracle", BOTH, indirect=True)
def test_one_after_another(oracle: Oracle, chunk: int):
    stats = run(oracle, oracle.fresh_core(max_num_batched_tokens=chunk), steps_between_arrivals=2)
    assert any(each.num_prefill_tokens and each.num_decode_tokens for each in stats), "nothing was mixed"


@pytest.mark.parametrize("oracle", BOTH, indirect=True)
def test_whole_prompts(oracle: Oracle):
    core = oracle.fresh_core(max_num_batched_tokens=8, enable_chunked_prefill=False)
    run(oracle, core, steps_between_arrivals=1)


@pytest.mark.parametrize("oracle", BOTH, indirect=True)
def test_warm_prefix_cache(oracle: Oracle):
    core = oracle.fresh_core()
    cold = run(oracle, core, steps_between_arrivals=0)
    warm = run(oracle, core, steps_between_arrivals=0)
    assert sum(s.num_prefix_hits for s in warm) > sum(s.num_prefix_hits for s in cold)


@pytest.mark.parametrize("oracle", BOTH, indirect=True)
def test_forced_preemption(oracle: Oracle):
    stats = run(oracle, oracle.fresh_core(num_blocks=320 // oracle.block_size), steps_between_arrivals=0)
    assert sum(each.num_preempted for each in stats) >= 3
