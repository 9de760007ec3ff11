"""The API over a real engine with a tiny random model: scores are the model's own, streams say what full answers say.

The scoring test does what lm-evaluation-harness does with a `local-completions` model: context and answer as token ids,
`echo`, `logprobs`, and no (or one) new token; the log-likelihood is the sum of `token_logprobs` behind the context.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch

from config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.client import AsyncEngine
from tests import factories_text as texts
from tests.factories_engine import FakeEngine
from tests.factories_http import events_of, make_client
from tests.factories_models import save_tiny_model, tiny_config

pytestmark = pytest.mark.anyio

TASK = [
    ("The chairlift never", [" stops", " sleeps", " at every chair.", " 缆车"]),
    ("A step carries one packed row of", [" tokens", " riders: 1 2 3", " crème"]),
    ("riders get on and off", [" at every chair", " never", "."]),
]
"""A made-up task: contexts and their answers."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), tiny_config("llama", vocab_size=400))
    texts.hf_byte_level().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
async def client(directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32", device="cpu", kernels="reference", num_threads=1),
        cache=CacheConfig(block_size=4, kv_cache_tokens=1024),
        scheduler=SchedulerConfig(max_num_batched_tokens=16),
    )
    engine = await AsyncEngine.start(config)
    try:
        async with make_client(cast(FakeEngine, engine)) as client:
            yield client
    finally:
        await engine.close()


def says(model: Any, token_ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary]: logprobs of each next token."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.log_softmax(-1)


def log_likelihood(model: Any, context: list[int], answer: list[int]) -> tuple[float, bool]:
    """The answer's, and whether it is what greedy decoding would say."""
    known = context + answer
    logprobs = says(model, known)[len(context) - 1 : -1]
    return logprobs[range(len(answer)), answer].sum().item(), logprobs.argmax(-1).tolist() == answer


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_multiple_choice_scores_are_the_models_own(
    client: httpx.AsyncClient, model: Any, max_tokens: int
) -> None:
    tokenizer = texts.byte_level()
    pairs = [(tokenizer.encode(context), tokenizer.encode(answer)) for context, all_ in TASK for answer in all_]
    for _ in range(2):  # cold, and with whatever the first round left in the cache
        body = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1234}
        answer = await complete(client, prompt=[context + ending for context, ending in pairs], **body)
        assert answer["usage"]["completion_tokens"] == max_tokens * len(pairs)
        assert len(answer["choices"]) == len(pairs)
        for (context, ending), choice in zip(pairs, answer["choices"], strict=True):
            span = slice(len(context), len(context) + len(ending))
            scores = choice["logprobs"]["token_logprobs"]
            tops = choice["logprobs"]["top_logprobs"][span]
            is_greedy = all(score == max(top.values()) for score, top in zip(scores[span], tops, strict=True))
            expected, expected_greedy = log_likelihood(model, context, ending)
            assert len(scores) == len(context) + len(ending) + max_tokens
            assert sum(scores[span]) == pytest.approx(expected, abs=1e-3)
            assert is_greedy == expected_greedy
            assert scores[0] is None


async def test_the_greedy_answer_is_recognised(client: httpx.AsyncClient) -> None:
    """Scoring what the model itself would say: every token is its likeliest."""
    context = texts.byte_level().encode("The chairlift never")
    made = await complete(client, prompt=context, max_tokens=5, temperature=0, return_token_ids=True)
    ending = made["choices"][0]["token_ids"]
    answer = await complete(client, prompt=context + ending, max_tokens=0, echo=True, logprobs=1)
    shape = answer["choices"][0]["logprobs"]
    behind = slice(len(context), None)
    assert len(shape["tokens"][behind]) == len(ending)
    for score, top in zip(shape["token_logprobs"][behind], shape["top_logprobs"][behind], strict=True):
        assert score == max(top.values())


async def test_echo_without_logprobs_is_the_prompt(client: httpx.AsyncClient) -> None:
    text = "Émile <|im_end|> 缆车"
    answer = await complete(client, prompt=[text, "b"], max_tokens=0, echo=True)
    assert [choice["text"] for choice in answer["choices"]] == [text, "b"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    ids = texts.byte_level().encode(text)
    answer = await complete(client, prompt=ids, max_tokens=0, echo=True, skip_special_tokens=False)
    assert answer["choices"][0]["text"] == text


SAMPLING = {"temperature": 1.3, "seed": 7, "top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.1}


@pytest.mark.parametrize("echo", [False, True])
async def test_completions_streamed_are_those_in_full(client: httpx.AsyncClient, model: Any, echo: bool) -> None:
    body = {
        "prompt": ["The chairlift", "crème 缆车"],
        "n": 2,
        "max_tokens": 12,
        "logprobs": 3,
        "echo": echo,
        "return_token_ids": True,
        **SAMPLING,
    }
    full = await complete(client, **body)
    events = events_of(await client.post("/v1/completions", json=body | {"stream": True}))
    for choice in full["choices"]:
        own = [each["choices"][0] for each in events if each["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert [i for each in own for i in each["token_ids"]] == choice["token_ids"]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for name, values in choice["logprobs"].items():
            assert [value for each in own for value in each["logprobs"][name]] == values
        known = choice["prompt_token_ids"] + choice["token_ids"]
        expected = says(model, known[:-1])[range(len(known) - 1), known[1:]].tolist()
        got = [score for score in choice["logprobs"]["token_logprobs"] if score is not None]
        assert got == pytest.approx(expected if echo else expected[-len(choice["token_ids"]) :], abs=1e-4)
    assert full["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 or not echo


async def test_chat_streamed_is_that_in_full(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "crème 缆车"}]
    body = {"messages": messages, "n": 2, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, **SAMPLING}
    full = (await client.post("/v1/chat/completions", json=body)).json()
    events = events_of(await client.post("/v1/chat/completions", json=body | {"stream": True}))
    for choice in full["choices"]:
        own = [each["choices"][0] for each in events if each["choices"][0]["index"] == choice["index"]]
        content = choice["logprobs"]["content"]
        assert [entry for each in own for entry in each["logprobs"]["content"]] == content
        assert "".join(each["delta"].get("content", "") for each in own) == choice["message"]["content"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        said = b"".join(bytes(entry["bytes"] or ()) for entry in content).decode(errors="replace")
        assert said == choice["message"]["content"]


async def test_prompt_logprobs_of_both_routes(client: httpx.AsyncClient, model: Any) -> None:
    body = {"max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True}
    completion = await complete(client, prompt="The chairlift never stops", **body)
    messages = [{"role": "user", "content": "hi"}]
    chat = (await client.post("/v1/chat/completions", json={"messages": messages, **body})).json()
    for choice, entries in (
        (completion["choices"][0], completion["choices"][0]["prompt_logprobs"]),
        (chat["choices"][0], chat["prompt_logprobs"]),
    ):
        ids = choice["prompt_token_ids"]
        expected = says(model, ids)
        assert len(entries) == len(ids)
        assert entries[0] is None
        for i, entry in enumerate(entries[1:], start=1):
            assert next(iter(entry)) == str(ids[i])
            for token_id, value in entry.items():
                assert value["logprob"] == pytest.approx(expected[i - 1, int(token_id)].item(), abs=1e-4)
            assert {1, 2} <= {value["rank"] for value in entry.values()}


async def test_best_of_shows_the_likeliest(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["The", "A step"], "max_tokens": 6, "logprobs": 0, **SAMPLING}
    all_six = await complete(client, n=6, **body)
    best = await complete(client, n=2, best_of=6, **body)

    def mean(choice: dict[str, Any]) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return sum(scores) / len(scores)

    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    for prompt in range(2):
        expected = sorted(all_six["choices"][6 * prompt : 6 * prompt + 6], key=mean, reverse=True)[:2]
        assert [c["text"] for c in best["choices"][2 * prompt : 2 * prompt + 2]] == [c["text"] for c in expected]
    assert best["usage"]["completion_tokens"] == all_six["usage"]["completion_tokens"]
    del body["logprobs"]
    assert [c["logprobs"] for c in (await complete(client, best_of=3, **body))["choices"]] == [None, None]


async def test_bans_and_biases_reach_the_model(client: httpx.AsyncClient) -> None:
    body = {"prompt": "The", "max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    plain = (await complete(client, **body))["choices"][0]["token_ids"]
    banned = (await complete(client, logit_bias={str(plain[0]): -100}, **body))["choices"][0]["token_ids"]
    assert plain[0] not in banned
    only = (await complete(client, allowed_token_ids=[70, 71], **body))["choices"][0]["token_ids"]
    assert set(only) <= {70, 71}
    forced = (await complete(client, logit_bias={"70": 100}, **body))["choices"][0]["token_ids"]
    assert forced == [70] * 8
    fresh = (await complete(client, logit_bias={"70": 100}, frequency_penalty=2, presence_penalty=2, **body))["choices"]
    assert fresh[0]["token_ids"] == forced  # a bias of 100 outweighs eight of them
    assert (await complete(client, **body))["choices"][0]["token_ids"] == plain  # nothing is left of all this


async def test_min_tokens_holds_off_every_end(client: httpx.AsyncClient) -> None:
    body = {"prompt": "The", "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    plain = (await complete(client, **body))["choices"][0]["token_ids"]
    stopping = {"stop_token_ids": [plain[2]], **body}
    assert (await complete(client, **stopping))["choices"][0]["token_ids"] == plain[: plain.index(plain[2]) + 1]
    held = (await complete(client, min_tokens=6, **stopping))["choices"][0]["token_ids"]
    assert plain[2] not in held[:6]
    assert len(held) >= 6
