"""The default model with int8 weights: it passes its own check when it is loaded, and says nearly the same."""

from __future__ import annotations

import pytest
import torch

from engine import LLMEngine, SamplingParams
from engine.model.resolve import resolve_model
from tests.cpu_kernels import build_kernels

TEXT = """Water is a chemical substance made of hydrogen and oxygen. At normal pressure it boils at 100 degrees and
freezes at 0. Rivers carry it to the sea, the sun lifts it into the air, and it falls again as rain or snow. Without it
there would be no plants and no animals, so people have always built their towns where it is."""


@pytest.fixture(scope="module")
def llm() -> LLMEngine:
    build_kernels()
    return LLMEngine(
        model="smollm2", dtype="bfloat16", quantization="int8", device="cpu", kernels="cpu", kv_cache_tokens=4096
    )


def test_it_is_loaded_and_answers(llm: LLMEngine) -> None:
    [completion] = llm.generate(["The capital of France is"], SamplingParams(max_tokens=1, temperature=0))
    assert completion.text == " Paris"


def test_it_finds_a_text_as_likely_as_the_model_itself(llm: LLMEngine) -> None:
    from transformers import AutoModelForCausalLM

    [completion] = llm.generate([TEXT], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    assert completion.prompt_logprobs is not None
    got = torch.tensor([entry.logprob for entry in completion.prompt_logprobs if entry is not None])
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.float32)
    token_ids = torch.tensor([completion.prompt_token_ids])
    with torch.inference_mode():
        logprobs = model(token_ids).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, token_ids[0, 1:, None])[:, 0]
    assert len(got) == len(expected)
    assert abs(float((got - expected).mean())) < 0.05
    assert float((got - expected).abs().mean()) < 0.2
