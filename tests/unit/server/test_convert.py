"""API model -> Work: defaults, names, numbers and order."""

from __future__ import annotations

from typing import Any, cast

import pytest

from engine.client import AsyncEngine
from engine.errors import EngineDead, RequestError
from engine.messages import Deadlines
from engine.params import FreePrefix, GrammarSpec, SamplingParams
from server.chat.dialect import Dialect
from server.chat.tools import FORMATS
from server.convert import Converter, Echo, Reports, Work
from server.errors import ModelNotFound
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from tests.factories_engine import FakeEngine

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "function": {"name": "f"}}


async def complete(engine: FakeEngine | None = None, **fields: Any) -> Work:
    body = CompletionRequest.model_validate({"prompt": "hi"} | fields)
    return await Converter(cast(AsyncEngine, engine or FakeEngine()), Dialect()).completion(body)


async def chat(engine: FakeEngine | None = None, dialect: Dialect | None = None, **fields: Any) -> Work:
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]} | fields)
    return await Converter(cast(AsyncEngine, engine or FakeEngine()), dialect or Dialect()).chat(body)


@pytest.mark.parametrize(
    ("asked_ms", "server_s", "expected_s"),
    [(None, None, None), (1500, None, 1.5), (None, 60, 60), (1500, 60, 1.5), (90_000, 60, 60)],
)
async def test_the_shorter_timeout_counts(
    asked_ms: int | None, server_s: int | None, expected_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.convert.time.monotonic", lambda: 100.0)
    converter = Converter(cast(AsyncEngine, FakeEngine()), Dialect(), request_timeout_s=server_s)
    work = await converter.completion(CompletionRequest(prompt=["hi"], timeout_ms=asked_ms))
    assert work.deadlines.end_s == (None if expected_s is None else 100.0 + expected_s)


async def test_the_longest_wait_is_counted_from_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.convert.time.monotonic", lambda: 100.0)
    converter = Converter(cast(AsyncEngine, FakeEngine()), Dialect(), max_queue_wait_s=5)
    work = await converter.completion(CompletionRequest(prompt=["hi"]))
    assert work.deadlines == Deadlines(start_s=105.0)


@pytest.mark.parametrize("timeout_ms", [0, -1, 24 * 60 * 60 * 1000 + 1])
async def test_timeout_ms_has_bounds(timeout_ms: int) -> None:
    with pytest.raises(RequestError, match=f"timeout_ms must be from 1 to 86400000, got {timeout_ms}") as caught:
        await complete(timeout_ms=timeout_ms)
    assert caught.value.param == "timeout_ms"


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


async def test_defaults_of_completions() -> None:
    work = await complete()
    (generation,) = work.generations
    assert list(generation.prompt_token_ids) == [2, *ids("hi")]
    assert generation.params == SamplingParams(max_tokens=16)
    assert (work.n, work.num_each, work.priority, work.cache_salt, work.reports) == (1, 1, 0, "", Reports())


async def test_defaults_of_chat() -> None:
    (generation,) = (await chat()).generations
    assert list(generation.prompt_token_ids) == ids("<user>hi\n<assistant>")  # the template writes special tokens
    assert generation.params == SamplingParams(max_tokens=None)


async def test_the_models_own_defaults_hold_where_a_request_says_nothing() -> None:
    engine = FakeEngine(sampling_defaults={"temperature": 0.6, "top_k": 20})
    (of_completion,) = (await complete(engine)).generations
    assert of_completion.params == SamplingParams(max_tokens=16, temperature=0.6, top_k=20)
    (of_chat,) = (await chat(engine, temperature=1, top_p=0.5)).generations
    assert of_chat.params == SamplingParams(max_tokens=None, temperature=1, top_p=0.5, top_k=20)


async def test_every_sampling_field_arrives() -> None:
    fields = {
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "seed": -3,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    tokens = {"logit_bias": {"5": -1.5, "6": 100}, "allowed_token_ids": [5, 6]}
    work = await complete(**fields, **tokens, stop="x", priority=-2, cache_salt="s", add_special_tokens=False)
    (generation,) = work.generations
    lists = {"stop": ("x",), "stop_token_ids": (7,), "logit_bias": {5: -1.5, 6: 100.0}, "allowed_token_ids": (5, 6)}
    assert generation.params == SamplingParams(**(fields | lists))  # type: ignore[arg-type]
    assert list(generation.prompt_token_ids) == ids("hi")
    assert (work.priority, work.cache_salt) == (-2, "s")


async def test_chat_may_ask_for_special_tokens() -> None:
    (generation,) = (await chat(add_special_tokens=True)).generations
    assert generation.prompt_token_ids[0] == 2


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
)
async def test_max_completion_tokens_wins(fields: dict[str, int], max_tokens: int) -> None:
    assert (await chat(**fields)).generations[0].params.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "logprobs", "prompt_logprobs", "reports"),
    [
        ({"logprobs": 0}, 0, None, Reports(logprobs=0)),
        ({"logprobs": 3, "echo": True}, 3, 3, Reports(logprobs=3)),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 5}, 3, 5, Reports(logprobs=3, prompt_logprobs=5)),
        ({"echo": True}, None, None, Reports()),
        ({"prompt_logprobs": 0, "max_tokens": 0}, None, 0, Reports(prompt_logprobs=0)),
        ({"best_of": 2}, 0, None, Reports()),
        ({"best_of": 2, "logprobs": 1}, 1, None, Reports(logprobs=1)),
        ({"best_of": 1, "return_token_ids": True}, None, None, Reports(token_ids=True)),
    ],
)
async def test_what_is_reported_and_what_the_engine_is_asked_for(
    fields: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None, reports: Reports
) -> None:
    work = await complete(**fields)
    assert work.reports == reports
    for generation in work.generations:
        assert (generation.params.logprobs, generation.params.prompt_logprobs) == (logprobs, prompt_logprobs)


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False, "top_logprobs": 0}, None), ({"logprobs": True}, 0), ({"top_logprobs": 4}, 4)],
)
async def test_chat_logprobs_are_two_fields(fields: dict[str, Any], logprobs: int | None) -> None:
    work = await chat(**({"logprobs": True} | fields if fields else {}))
    assert work.reports.logprobs == work.generations[0].params.logprobs == logprobs


async def test_best_of_generates_more_than_it_shows() -> None:
    work = await complete(prompt=["a", "b"], n=2, best_of=5)
    assert (work.n, work.num_each, len(work.generations)) == (2, 5, 10)


async def test_echoes_are_the_clients_texts_or_what_its_ids_say() -> None:
    work = await complete(prompt=["a\x02b", "c"], echo=True, n=2)
    texts = [Echo("a\x02b", is_clients=True), Echo("c", is_clients=True)]
    assert [each.echo for each in work.generations] == [texts[0], texts[0], texts[1], texts[1]]
    assert (await complete(prompt=[97, 2, 98], echo=True)).generations[0].echo == Echo("ab", is_clients=False)
    work = await complete(prompt=[97, 2, 98], echo=True, skip_special_tokens=False)
    assert work.generations[0].echo == Echo("a\x02b", is_clients=False)
    assert (await complete(prompt="a")).generations[0].echo is None


async def test_choices_are_in_prompt_order() -> None:
    work = await complete(prompt=[[5], [6, 7]], n=2)
    assert [list(each.prompt_token_ids) for each in work.generations] == [[5], [5], [6, 7], [6, 7]]
    assert work.n == 2


async def test_seeded_choices_differ_and_the_first_is_what_one_choice_gets() -> None:
    work = await complete(prompt=["a", "b"], n=3, seed=42)
    seeds = [each.params.seed for each in work.generations]
    assert seeds[0] == 42
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]  # each prompt gets what it gets alone
    assert seeds == [each.params.seed for each in (await complete(prompt=["a", "b"], n=3, seed=42)).generations]
    assert all(seed is not None and 0 <= seed < 2**64 for seed in seeds)


async def test_choices_without_a_seed_are_left_to_the_engine() -> None:
    assert {each.params.seed for each in (await complete(n=3)).generations} == {None}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens", "at least 1, got -1"),
        ({"max_tokens": 62}, "max_tokens", "3 tokens and max_tokens is 62, together 65; the context length is 64"),
        ({"max_tokens": 10**30}, "max_tokens", "the context length is 64"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "at least 0"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "at least 1"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20, got 21"),
        ({"logprobs": -1}, "logprobs", "from 0 to 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not for streams"),
        ({"best_of": 2, "n": 3}, "best_of", "from n, which is 3, to 128, got 2"),
        ({"best_of": 0}, "best_of", "from n, which is 1"),
        ({"best_of": 129}, "best_of", "to 128, got 129"),
        ({"best_of": 2, "stream": True}, "best_of", "not for streams"),
        ({"prompt": ["a"] * 9, "best_of": 128}, "prompt", "9 prompts with best_of = 128 make 1152 choices"),
        ({"temperature": -0.1}, "temperature", ">= 0"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_p": 1.1}, "top_p", "at most 1"),
        ({"top_k": -2}, "top_k", "-1 for off"),
        ({"min_p": 1.5}, "min_p", "from 0 to 1"),
        ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2, got 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "from -2 to 2, got -2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0, got 0"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "token id -5"),
        ({"logit_bias": {str(1 << 40): 1}}, "logit_bias", "token id"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "token id -1"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, "allowed_token_ids", "leave no token"),
        ({"allowed_token_ids": [5], "logit_bias": {"5": -100}}, "allowed_token_ids", "leave no token"),
        ({"min_tokens": -1}, "min_tokens", "from 0 to max_tokens"),
        ({"min_tokens": 17}, "min_tokens", "from 0 to max_tokens, got 17"),
        ({"seed": 2**64}, "seed", "64-bit"),
        ({"seed": -(2**63) - 1}, "seed", "64-bit"),
        ({"stop": ""}, "stop", "not empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token id -1"),
        ({"stop_token_ids": [1 << 40]}, "stop_token_ids", "token id"),
        ({"n": 0}, "n", "n must be from 1 to 128, got 0"),
        ({"n": 129}, "n", "from 1 to 128, got 129"),
        ({"n": 10**30}, "n", "from 1 to 128"),
        ({"prompt": ["a"] * 9, "n": 128}, "prompt", "9 prompts with n = 128 make 1152 choices"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [-1]}, "prompt", "token id -1; this model's ids are 0 to 1114111"),
        ({"prompt": [1 << 40]}, "prompt", "token id"),
        ({"prompt": [[5], [5, 1 << 70]]}, "prompt", "token id"),
        ({"prompt": [5] * 64}, "prompt", "the prompt has 64 tokens; the context length is 64"),
        ({"prompt": "x" * 1000}, "prompt", "the prompt has 1001 tokens; the context length is 64"),
        ({"prompt": "", "add_special_tokens": False}, "prompt", "empty"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ({"cache_salt": "x" * 1025}, "cache_salt", "1024 characters"),
    ],
)
async def test_what_is_refused_names_its_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        await complete(**fields)
    assert caught.value.param == param
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "Conversation roles must alternate"),
        ({"messages": [{"role": "user", "content": "x" * 99}]}, "messages", "the context length is 64"),
        ({"max_tokens": 99}, "max_tokens", "the context length is 64"),
        ({"max_completion_tokens": 99}, "max_completion_tokens", "and max_completion_tokens is 99, together"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "from 0 to 20, got 21"),
        ({"top_logprobs": -1}, "top_logprobs", "from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "enable_thinking"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "enable_thinking"),
        ({"chat_template_kwargs": {"thinking": [1]}}, "chat_template_kwargs", "string, number or boolean"),
        ({"chat_template_kwargs": {"date_string": "x" * 1025}}, "chat_template_kwargs", "1024 characters"),
    ],
)
async def test_what_chat_refuses_names_the_clients_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        await chat(**fields)
    assert caught.value.param == param
    assert says in str(caught.value)


async def test_too_long_has_its_own_code() -> None:
    with pytest.raises(RequestError) as caught:
        await chat(max_tokens=99)
    assert caught.value.code == "context_length_exceeded"


async def test_switches_reach_the_template() -> None:
    engine = FakeEngine()
    await chat(engine, chat_template_kwargs={"enable_thinking": False, "date_string": "today"})
    assert engine.tokenizer.chats[0][1] == {"enable_thinking": False, "date_string": "today"}


async def test_only_the_served_model_is_found() -> None:
    assert await complete(model="fake/model") == await complete(model=None)
    with pytest.raises(ModelNotFound, match=r"'gpt-4' is not served here: 'fake/model' is"):
        await complete(model="gpt-4")


async def test_a_dead_engine_is_told_before_anything_is_queued() -> None:
    engine = FakeEngine()
    engine.dead = EngineDead("it broke")
    with pytest.raises(EngineDead, match="it broke"):
        await complete(engine)
    assert engine.calls == []


async def test_a_chat_may_go_on_with_its_last_message_or_open_no_turn() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    (goes_on,) = (await chat(messages=messages, continue_final_message=True)).generations
    assert list(goes_on.prompt_token_ids) == ids("<user>hi\n<assistant>Well")
    (closed,) = (await chat(messages=messages, add_generation_prompt=False)).generations
    assert list(closed.prompt_token_ids) == ids("<user>hi\n<assistant>Well\n")


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt": "x" * 5000 + "abc", "truncate_prompt_tokens": 3}, "abc"),
        ({"prompt": "abc", "truncate_prompt_tokens": 2}, "bc"),
        ({"prompt": ids("abc"), "truncate_prompt_tokens": 3}, "abc"),
        ({"prompt": ids("abc"), "truncate_prompt_tokens": 4}, "abc"),
        ({"prompt": "x" * 5000, "truncate_prompt_tokens": -1}, "x" * (64 - 16)),
        ({"prompt": "x" * 5000, "truncate_prompt_tokens": -1, "max_tokens": 4}, "x" * 60),
    ],
)
async def test_a_prompt_may_be_cut_to_its_end(fields: dict[str, Any], prompt: str) -> None:
    (generation,) = (await complete(**fields)).generations
    assert list(generation.prompt_token_ids) == ids(prompt)


async def test_a_chat_may_be_cut_to_its_end() -> None:
    (generation,) = (await chat(truncate_prompt_tokens=5)).generations
    assert list(generation.prompt_token_ids) == ids("tant>")


@pytest.mark.parametrize("num_tokens", [0, -2])
async def test_a_prompt_is_not_cut_to_nothing(num_tokens: int) -> None:
    with pytest.raises(RequestError, match="-1 or at least 1") as caught:
        await complete(truncate_prompt_tokens=num_tokens)
    assert caught.value.param == "truncate_prompt_tokens"


async def test_what_a_grammar_forms_has_no_calls_in_it_and_thoughts_only_before_it() -> None:
    form = {"tools": [TOOL], "response_format": {"type": "json_object"}}
    work = await chat(dialect=Dialect(False, FORMATS["mistral"], shows_tools=True), **form)
    assert work.reading is None
    work = await chat(dialect=Dialect(True, FORMATS["mistral"], shows_tools=True), **form)
    assert work.reading is not None
    assert (work.reading.thinks, work.reading.tool_format) == (True, None)
    grammar = work.generations[0].params.grammar
    assert grammar == GrammarSpec("json_object", prefix=FreePrefix(begin="<think>", end="</think>"))


async def test_thoughts_that_the_prompt_has_opened_must_end_before_the_form() -> None:
    fields = {"messages": [{"role": "user", "content": "<think>"}], "add_generation_prompt": False}
    for form in ({"structured_outputs": {"regex": "a+"}}, {"tools": [TOOL], "tool_choice": "required"}):
        goes_on = {"continue_final_message": True}
        engine = FakeEngine(max_model_len=1024)
        work = await chat(engine, Dialect(thinks=True), **fields, **goes_on, **form)
        assert work.reading is not None
        assert work.reading.is_thinking
        grammar = work.generations[0].params.grammar
        assert grammar is not None
        assert grammar.prefix == FreePrefix(end="</think>")
    assert work.generations[0].params.skip_special_tokens


async def test_marks_of_calls_are_text_where_calls_may_come() -> None:
    dialect = Dialect(tool_format=FORMATS["mistral"], shows_tools=True)
    assert not (await chat(dialect=dialect, tools=[TOOL])).generations[0].params.skip_special_tokens
    assert (await chat(dialect=dialect)).generations[0].params.skip_special_tokens
