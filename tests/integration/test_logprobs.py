"""Logprobs equal those of a plain forward pass, however the engine came to compute the tokens.

The oracle runs prompt and output in one piece through the model's own attention. The engine runs them in chunks, packed
with others, from a warm prefix cache, and after preemptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from config.schema import ModelConfig
from engine.messages import Failed, TokensOut
from engine.model.loader import LoadedModel, load_model
from engine.plan import TokenLogprobs
from tests.factories import make_submit
from tests.factories_models import save_tiny_model, tiny_config
from tests.integration.oracle import make_core

PROMPT_LENS = (1, 2, 7, 8, 9, 30, 41, 30)
NUM_OUTPUT = 14
NUM_TOP = 4


@dataclass
class Got:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    loaded: LoadedModel
    model: torch.nn.Module
    """The same, as transformers runs it."""
    prompts: list[list[int]]

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary]: what the model says of each next token."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits.log_softmax(-1)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    from transformers import AutoModelForCausalLM

    path: Path = save_tiny_model(tmp_path_factory.mktemp("model"), tiny_config(request.param))
    config = ModelConfig(device="cpu", dtype="float32", kernels="reference", num_threads=1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = [torch.randint(128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in PROMPT_LENS]
    prompts[-2][:24] = prompts[-1][:24]  # found in the prefix cache
    return Case(load_model(path, config), model, prompts)


def run(
    case: Case, *, rounds: int = 1, num_blocks: int = 128, least: dict[str, int] | None = None, **core: int
) -> None:
    """Generate from all prompts at once, `rounds` times, and hold every logprob against the oracle's."""
    engine = make_core(case.loaded, block_size=4, num_blocks=num_blocks, **core)
    all_got: dict[int, Got] = {}
    counts = {"preempted": 0, "prefix_hits": 0}
    for _ in range(rounds):
        for prompt in case.prompts:
            number = len(all_got)
            # Every other request takes the prefix cache, and every third samples with all sorts of parameters.
            odd = {"temperature": 1.5, "seed": 5, "logit_bias": {3: 9.0}, "presence_penalty": 1.0}
            params = odd if number % 3 == 0 else {"temperature": 0.0}
            params |= {"logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP if number % 2 == 0 else None}
            engine.submit(make_submit(number, prompt, max_tokens=NUM_OUTPUT, arrival_s=float(number), **params))
            all_got[number] = Got()
        while engine.has_work:
            report = engine.step()
            assert report.stats is not None
            counts["preempted"] += report.stats.num_preempted
            counts["prefix_hits"] += report.stats.num_prefix_hits
            for event in report.events:
                assert not isinstance(event, Failed), event
                if isinstance(event, TokensOut):
                    got = all_got[event.request_id]
                    got.token_ids += event.token_ids
                    got.logprobs += event.logprobs
                    got.prompt_logprobs += event.prompt_logprobs
            engine.check_integrity()
    for number, got in all_got.items():
        check(case, case.prompts[number % len(case.prompts)], got, has_prompt=number % 2 == 0)
    assert all(counts[name] >= count for name, count in (least or {}).items()), counts


def check(case: Case, prompt: list[int], got: Got, *, has_prompt: bool) -> None:
    assert len(got.token_ids) == len(got.logprobs) == NUM_OUTPUT
    assert len(got.prompt_logprobs) == (len(prompt) - 1 if has_prompt else 0)
    known = prompt + got.token_ids
    expected = case.expected(known)
    places = [*range(1, len(prompt))] * has_prompt + [*range(len(prompt), len(known))]
    for place, entry in zip(places, got.prompt_logprobs + got.logprobs, strict=True):
        says = expected[place - 1]
        assert entry.token_id == known[place]
        assert entry.logprob == pytest.approx(says[known[place]].item(), rel=1e-4, abs=1e-4)
        assert [logprob for _, logprob in entry.top] == pytest.approx(
            says.topk(NUM_TOP).values.tolist(), rel=1e-4, abs=1e-4
        )
        assert [logprob for _, logprob in entry.top] == pytest.approx(
            says[[i for i, _ in entry.top]].tolist(), abs=1e-4
        )
        above, below = (says > entry.logprob + 1e-4).sum().item(), (says > entry.logprob - 1e-4).sum().item()
        assert 1 + above <= entry.rank <= max(1, below)


@pytest.mark.parametrize("chunk", [1, 5, 32, 512])
def test_in_chunks(case: Case, chunk: int) -> None:
    run(case, max_num_batched_tokens=chunk)


def test_prompts_that_do_not_go_in_chunks(case: Case) -> None:
    run(case, max_num_batched_tokens=16, enable_chunked_prefill=False)


def test_with_a_warm_prefix_cache(case: Case) -> None:
    run(case, rounds=2, max_num_batched_tokens=64, least={"prefix_hits": 40})


def test_after_preemption(case: Case) -> None:
    run(case, num_blocks=20, max_num_batched_tokens=12, least={"preempted": 3})


def test_scoring_in_small_shares(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduler.MAX_SCORED_TOKENS", 6)
    run(case, max_num_batched_tokens=64)
