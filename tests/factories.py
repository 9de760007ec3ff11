"""What the tests make again and again: requests, schedulers, and an engine core over a fake model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from config.schema import SchedulerConfig
from engine.core import EngineCore, ModelInfo
from engine.isolation import IsolatingRunner
from engine.kv.blocks import BlockPool
from engine.kv.manager import KVCacheManager
from engine.messages import Submit
from engine.params import SamplingParams
from engine.plan import PlanRow, SampledRow, ScoredRow, StepPlan, StepResult, TokenLogprobs
from engine.request import Request
from engine.scheduler import Scheduler
from engine.text.pieces import Pieces

VOCAB_SIZE = 50
EOS = 0


def next_token(context: Sequence[int]) -> int:
    """The fake model: the next token is a pure function of all tokens before it (modulo 256)."""
    return hashlib.sha256(bytes([token % 256 for token in context])).digest()[0] % VOCAB_SIZE


def expected_output(prompt: Sequence[int], max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """What the fake model generates for a prompt that runs alone."""
    context = list(prompt)
    while len(context) - len(prompt) < max_tokens:
        context.append(next_token(context))
        if context[-1] in stop_ids:
            break
    return context[len(prompt) :]


def fake_logprobs(before: Sequence[int], token_id: int) -> TokenLogprobs:
    """What the fake model says of a token after these: a pure function of both."""
    digest = hashlib.sha256(bytes([*before, token_id, 255])).digest()
    return TokenLogprobs(token_id, -digest[0] / 16, rank=digest[1])


@dataclass
class FakeRunner:
    """Writes tokens into a pretend KV cache and samples from what it reads back through each row's block table.

    So a wrong slot, a block shared wrongly or reused too early changes the output, as it would with a real model.
    """

    block_size: int
    num_blocks: int
    poisoned: set[int] = field(default_factory=set)
    """Requests whose rows fail."""
    broken: set[int] = field(default_factory=set)
    """Requests whose rows make their whole step raise."""
    num_glitches: int = 0
    """Steps to come that raise, whoever is in them."""
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = [[-1] * self.block_size for _ in range(self.num_blocks)]

    def launch(self, plan: StepPlan) -> FakeRunner:
        self.plans.append(plan)
        if self.num_glitches:
            self.num_glitches -= 1
            raise MemoryError("a glitch")
        return self

    def collect(self) -> StepResult:
        rows = self.plans[-1].rows
        for row in rows:  # all writes come before all reads, as in each layer of the model
            for i, token in enumerate(row.token_ids):
                block, offset = divmod(row.start + i, self.block_size)
                self.cache[row.block_ids[block]][offset] = -2 if row.request_id in self.broken else token
        if not self.broken.isdisjoint(row.request_id for row in rows):
            raise ValueError("a step with a broken row")
        return StepResult(
            tuple(self._sample(row) for row in rows if row.sampling is not None),
            tuple(self._score(row) for row in rows if row.scoring is not None),
        )

    def _sample(self, row: PlanRow) -> SampledRow:
        if row.request_id in self.poisoned:
            return SampledRow(row.request_id, -1, error="logits are not finite")
        assert row.sampling is not None
        context = self._read(row)
        token_id = next_token(context)
        wanted = row.sampling.logprobs is not None
        return SampledRow(row.request_id, token_id, logprobs=fake_logprobs(context, token_id) if wanted else None)

    def _score(self, row: PlanRow) -> ScoredRow:
        if row.request_id in self.poisoned:
            return ScoredRow(row.request_id, (), error="logits are not finite")
        assert row.scoring is not None
        assert row.start < row.scoring.targets.start, "the logits before the target are not in this row"
        before = self._read(row)
        targets = row.scoring.targets
        return ScoredRow(row.request_id, tuple(fake_logprobs(before[:i], row.context[i]) for i in targets))

    def _read(self, row: PlanRow) -> list[int]:
        """The tokens in the cache up to the end of the row."""
        return [self.cache[row.block_ids[p // self.block_size]][p % self.block_size] for p in range(row.end)]


def make_manager(num_blocks: int = 16, block_size: int = 4, *, prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), block_size=block_size, prefix_caching=prefix_caching, secret=b"test")


def make_request(prompt: Sequence[int], request_id: int = 0, *, max_tokens: int = 8, **fields: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id, list(prompt), len(prompt), params, max_tokens, seed=0, **fields)  # type: ignore[arg-type]


def make_info(**fields: object) -> ModelInfo:
    defaults: dict[str, object] = {
        "name": "fake",
        "max_model_len": 64,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": frozenset({EOS}),
        "num_parameters": 1,
        "dtype": "float32",
        "device": "cpu",
        "kernels": "fake",
        "block_size": 4,
        "num_blocks": 16,
        "kv_cache_dtype": "float32",
    }
    return ModelInfo(**(defaults | fields))  # type: ignore[arg-type]


def make_core(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    prefix_caching: bool = True,
    clock: Callable[[], float] | None = None,
    **scheduler: object,
) -> tuple[EngineCore, FakeRunner]:
    """A real core, scheduler and block manager over the fake model."""
    kv = make_manager(num_blocks, block_size, prefix_caching=prefix_caching)
    config = SchedulerConfig(**({"max_num_seqs": 8, "max_num_batched_tokens": 16} | scheduler))  # type: ignore[arg-type]
    runner = FakeRunner(block_size, num_blocks)
    info = make_info(max_model_len=num_blocks * block_size, block_size=block_size, num_blocks=num_blocks)
    ticks = iter(range(10**9))
    isolating = IsolatingRunner(runner, block_size)
    core = EngineCore(Scheduler(config, kv), isolating, info, clock or (lambda: float(next(ticks))))
    return core, runner


def make_submit(request_id: int, prompt: Sequence[int], **fields: object) -> Submit:
    """A Submit; SamplingParams' fields go to its params, the others to the message."""
    message = {
        name: fields.pop(name) for name in ("priority", "cache_salt", "arrival_s", "deadlines") if name in fields
    }
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return Submit(request_id, tuple(prompt), params, **message)  # type: ignore[arg-type]


class LetterTokenizer:
    """What RequestOutput needs of a Tokenizer: token i is the i-th letter from "A"; 49 is a special token."""

    pieces = Pieces(tuple(bytes([65 + i]) for i in range(VOCAB_SIZE)))
    special_token_ids = frozenset({49})

    def to_json(self) -> str:
        raise AssertionError("no test with this tokenizer has a grammar")


def letters(token_ids: Sequence[int]) -> str:
    """The text of these tokens by LetterTokenizer."""
    return "".join(chr(65 + token_id) for token_id in token_ids if token_id != 49)
