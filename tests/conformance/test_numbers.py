"""13 to 17: logprobs, sampling, seeds, and the prefix cache."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conformance.api import CHAT, COMPLETIONS, Answer, Api

TEXT = (
    "A chairlift is a type of aerial lift, which consists of a continuously circulating steel wire rope loop strung "
    "between two end terminals and usually over intermediate towers. They carry a series of chairs. "
)


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
def test_13_logprobs_of_completions_have_one_entry_for_each_token(api: Api, stream: bool) -> None:
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "logprobs": 3}
    logprobs = api.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {8}
    assert all(math.isfinite(each) and each <= 0 for each in logprobs["token_logprobs"])
    answer = api.complete(TEXT, max_tokens=8, logprobs=3, stream=stream)
    [choice] = answer.choices.values()
    assert choice.tokens == logprobs["tokens"]
    assert choice.logprobs == pytest.approx(logprobs["token_logprobs"], abs=1e-3)
    assert "".join(choice.tokens) == choice.text


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
def test_13_bytes_of_chat_logprobs_decode_to_the_text(api: Api, stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "Write 😀 and é."}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = api.chat("Write 😀 and é.", max_tokens=12, logprobs=True, top_logprobs=2, stream=stream)
    entries = api.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == answer.choices[0].tokens
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
    assert text.startswith(answer.text)


def test_13_echo_scores_the_prompt(api: Api) -> None:
    body = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    response = api.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert choice["text"] == TEXT
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["token_logprobs"]) == response.json()["usage"]["prompt_tokens"]
    assert all(math.isfinite(each) for each in choice["logprobs"]["token_logprobs"][1:])


@pytest.mark.parametrize("temperature", [0, 1e-9])
def test_14_temperature_0_and_tiny_ones_are_greedy(api: Api, temperature: float) -> None:
    texts = {api.complete(TEXT, max_tokens=8, temperature=temperature, seed=seed).text for seed in (1, 2, 3)}
    assert len(texts) == 1


FILTERED: dict[str, Any] = {"max_tokens": 12, "temperature": 1, "seed": 5}


@pytest.fixture(scope="module")
def unfiltered(api: Api) -> str:
    return api.complete(TEXT, **FILTERED).text


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"min_p": 0}, {"top_k": None}], ids=str)
def test_14_filters_that_are_off_change_nothing(api: Api, unfiltered: str, off: dict[str, Any]) -> None:
    if not api.is_ours and "top_p" not in off:
        pytest.skip("what is not OpenAI's may be on by default")
    assert api.complete(TEXT, **FILTERED, **off).text == unfiltered


def test_15_parameters_do_not_leak_between_requests(api: Api) -> None:
    greedy = api.complete(TEXT, max_tokens=12).text
    neighbours: list[dict[str, Any]] = [
        {"temperature": 2, "seed": 1},
        {"temperature": 0, "logit_bias": {"1000": 100}},
        {"temperature": 0, "presence_penalty": 2, "frequency_penalty": 2},
        {"temperature": 0, "stop": [greedy[1:3]]},
        {},
        {"temperature": 1, "top_p": 0.1},
    ]
    if api.takes(COMPLETIONS, "top_k"):
        neighbours.append({"temperature": 1, "top_k": 2})
    for _ in range(2):  # the second time in the places of the first
        with ThreadPoolExecutor(len(neighbours)) as pool:
            answers = list(pool.map(lambda more: api.complete(TEXT, **({"max_tokens": 12} | more)), neighbours))
        assert answers[4].text == greedy
    assert api.complete(TEXT, max_tokens=12).text == greedy


def test_16_same_seed_same_text_alone_and_in_a_batch(api: Api) -> None:
    def ask(seed: int | None) -> str:
        return api.complete(TEXT, max_tokens=12, temperature=1.2, seed=seed).text

    alone = ask(7)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, [1, 2, 7, None, 3, 7, None, 4]))
    assert together[2] == together[5] == alone
    assert len(set(together)) == 7


def test_16_choices_differ(api: Api) -> None:
    answer = api.complete(TEXT, max_tokens=16, temperature=1.2, n=4, seed=3)
    assert len({choice.text for choice in answer.choices.values()}) == 4


def salted(salt: str | None) -> dict[str, str]:
    """What keeps a prompt's cached prefixes apart, for servers that know it."""
    return {} if salt is None else {"cache_salt": salt}


@pytest.mark.parametrize("length", [31, 32, 33, 64, *(pytest.param(n, marks=pytest.mark.slow) for n in (63, 65, 96))])
def test_17_warm_prefix_cache_equals_cold(api: Api, length: int) -> None:
    """Around the borders of blocks; twice, so that the second finds what the first has left."""
    ids = (api.ids_of(TEXT * 6) * 2)[length:][:length]
    # Without salts the prompts of longer cases are warm at once
    salts = (f"a{length}", f"b{length}") * 2 if api.takes(COMPLETIONS, "cache_salt") else (None,) * 4
    answers = [api.complete(ids, max_tokens=6, logprobs=1, **salted(salt)) for salt in salts]
    assert len({answer.text for answer in answers}) == 1
    cold, *warm = [answer.choices[0].logprobs for answer in answers]
    for logprobs in warm:
        assert logprobs == pytest.approx(cold, abs=1e-3)
    if api.is_ours and length > 32:
        assert answers[2].usages[0]["prompt_tokens_details"]["cached_tokens"] > 0


def test_17_warm_equals_cold_after_an_aborted_request(api: Api) -> None:
    has_salts = api.takes(COMPLETIONS, "cache_salt")

    def ask(salt: str) -> Answer:
        return api.complete(TEXT, max_tokens=8, logprobs=1, **salted(salt if has_salts else None))

    cold = ask("cold")
    body = {"model": api.model, "prompt": TEXT, "max_tokens": 500, "stream": True}
    body |= salted("aborted" if has_salts else None)
    with api.http.stream("POST", COMPLETIONS, json=body) as response:
        next(response.iter_lines())
    warm = ask("aborted")
    assert warm.text == cold.text
    assert warm.choices[0].logprobs == pytest.approx(cold.choices[0].logprobs, abs=1e-3)


def test_17_echo_with_logprobs_is_the_same_on_a_warm_cache(api: Api) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
    first, second = (api.post(COMPLETIONS, body).json()["choices"][0]["logprobs"] for _ in range(2))
    assert first["tokens"] == second["tokens"]
    assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=1e-3)
