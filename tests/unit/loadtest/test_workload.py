"""The load is a pure function of its spec: lengths, kinds of prompt, fields, arrivals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from loadtest.workload import WORDS, LoadSpec, make_jobs, poisson_arrivals

SPEC = LoadSpec(num_requests=50, input_len=20, output_len=10, seed=3)


def bodies(spec: LoadSpec) -> list[dict[str, Any]]:
    return [json.loads(job.body) for job in make_jobs(spec, "m")]


def test_same_seed_same_load() -> None:
    assert make_jobs(SPEC, "m") == make_jobs(SPEC, "m")
    assert make_jobs(replace(SPEC, seed=4), "m") != make_jobs(SPEC, "m")


def test_lengths_stay_within_the_spread_and_reach_for_its_ends() -> None:
    loads = bodies(replace(SPEC, num_requests=500))
    prompt_lens = [len(body["prompt"]) for body in loads]
    max_tokens = [body["max_tokens"] for body in loads]
    assert (min(prompt_lens), max(prompt_lens)) == (10, 29)
    assert (min(max_tokens), max(max_tokens)) == (5, 14)


def test_no_spread_is_exact() -> None:
    assert {(len(body["prompt"]), body["max_tokens"]) for body in bodies(replace(SPEC, spread=0.0))} == {(20, 10)}


def test_a_spread_of_one_never_asks_for_nothing() -> None:
    loads = bodies(LoadSpec(num_requests=200, input_len=1, output_len=1, spread=1.0))
    assert {len(body["prompt"]) for body in loads} == {1}
    assert {body["max_tokens"] for body in loads} == {1}


def test_ids_are_drawn_from_the_range_and_counted() -> None:
    jobs = make_jobs(replace(SPEC, token_ids=(5, 8)), "m")
    prompts = [json.loads(job.body)["prompt"] for job in jobs]
    assert {token_id for prompt in prompts for token_id in prompt} == {5, 6, 7}
    assert [job.num_prompt_tokens for job in jobs] == [len(prompt) for prompt in prompts]


def test_default_body() -> None:
    body = bodies(SPEC)[0]
    del body["prompt"], body["max_tokens"]
    assert body == {
        "model": "m",
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_fields_that_strict_servers_refuse_can_be_left_out() -> None:
    body = bodies(replace(SPEC, ignore_eos=False, ask_usage=False))[0]
    assert body.keys() == {"model", "prompt", "max_tokens", "temperature", "stream"}


def test_extra_fields_win() -> None:
    body = bodies(replace(SPEC, extra={"top_k": 5, "temperature": 1}))[0]
    assert (body["top_k"], body["temperature"]) == (5, 1)


def test_text_is_words_whose_tokens_only_the_server_can_count() -> None:
    job = make_jobs(replace(SPEC, text=True, spread=0.0), "m")[0]
    words = json.loads(job.body)["prompt"].split(" ")
    assert len(words) == 20
    assert set(words) <= set(WORDS)
    assert job.num_prompt_tokens is None


def test_chat_is_one_user_message_of_words() -> None:
    spec = replace(SPEC, chat=True, spread=0.0)
    [message] = bodies(spec)[0]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split(" ")) == 20
    assert spec.path == "/v1/chat/completions"


@pytest.mark.parametrize("text", [False, True])
def test_the_shared_prefix_comes_on_top(text: bool) -> None:
    loads = bodies(replace(SPEC, spread=0.0, shared_prefix_len=6, text=text))
    prompts = [body["prompt"].split(" ") if text else body["prompt"] for body in loads]
    assert {len(prompt) for prompt in prompts} == {26}
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt[6:]) for prompt in prompts}) == len(prompts)


def test_poisson_arrivals_rise_at_the_rate() -> None:
    arrivals = poisson_arrivals(4000, 8.0, seed=1)
    assert arrivals == sorted(arrivals)
    assert arrivals == poisson_arrivals(4000, 8.0, seed=1)
    assert 4000 / arrivals[-1] == pytest.approx(8.0, rel=0.05)
