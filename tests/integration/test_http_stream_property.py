"""Whatever is asked for, of whichever tokenizer: a stream says what the full answer says, to the last number.

A tiny random model serves two kinds of tokenizers. Of all tokens it chooses among, some are whole tags and calls, so
that thoughts and calls come about, cut off and broken ones as well.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.client import AsyncEngine
from engine.text.tokenizer import Tokenizer
from tests import factories_text as texts
from tests.factories_answers import Choice, of_full, of_stream
from tests.factories_engine import FakeEngine
from tests.factories_http import events_of, make_client
from tests.factories_models import save_tiny_model, tiny_config

TOKENIZERS: dict[str, Callable[..., Any]] = {"byte level": texts.hf_byte_level, "sentencepiece": texts.hf_sentencepiece}
PARSERS = ["hermes", "llama3_json", "mistral", "pythonic"]
CALL = '{"name": "f", "arguments": {"a": "é"}}'
PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    f"<tool_call>{CALL}</tool_call>",
    CALL,
    '{"name": "f", "arguments": {"a": "',
    '{"name": "g", "arguments": {',
    '"}}',
    f"[TOOL_CALLS][{CALL}]",
    '[TOOL_CALLS]f{"a": "',
    '"}',
    "[f(a='é')]",
    "[f(a='",
    "')]",
    "\n",
    ";",
]
"""Tokens beside the tokenizer's own."""

_salts = itertools.count()


@dataclass
class Served:
    """One model, its clients by (tool parser, reasoning parser), and the thread whose event loop they live on."""

    portal: BlockingPortal
    engine: AsyncEngine
    tokenizer: Tokenizer
    clients: dict[tuple[str, str], httpx.AsyncClient] = field(default_factory=dict)

    def post(self, path: str, body: dict[str, Any], parsers: tuple[str, str] = ("none", "none")) -> httpx.Response:
        """Ask, with nothing in the prefix cache that this could find."""
        if parsers not in self.clients:
            engine = cast(FakeEngine, self.engine)
            make = partial(make_client, engine, None, tool_parser=parsers[0], reasoning_parser=parsers[1])
            self.clients[parsers] = self.portal.call(make)
        return self.portal.call(partial(self.clients[parsers].post, path, json=body | {"cache_salt": next_salt()}))

    def ids(self, *tokens: str) -> list[int]:
        """Ids of the tokens of PIECES."""
        return [self.tokenizer.encode(token, add_special_tokens=False)[-1] for token in tokens]


def next_salt() -> str:
    return str(next(_salts))


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    hf_tokenizer = TOKENIZERS[request.param](chat_template=texts.CHATML)
    hf_tokenizer.backend_tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in PIECES])
    path: Path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, tiny_config("llama", vocab_size=448, max_position_embeddings=1024))
    hf_tokenizer.save_pretrained(path)
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", device="cpu", num_threads=1),
        cache=CacheConfig(kv_cache_tokens=4096),
        scheduler=SchedulerConfig(max_num_batched_tokens=64),
    )
    with start_blocking_portal() as portal:
        engine = portal.call(AsyncEngine.start, config)
        try:
            yield Served(portal, engine, engine.tokenizer)
        finally:
            portal.call(engine.close)


def assert_same(
    served: Served, path: str, body: dict[str, Any], parsers: tuple[str, str] = ("none", "none")
) -> list[Choice]:
    """The stream of a request says what its full answer says, errors too; the choices, if it is none."""
    options = body.pop("stream_options", None)
    response = served.post(path, body, parsers)
    streamed = served.post(path, body | {"stream": True, "stream_options": options}, parsers)
    assert streamed.status_code == response.status_code, response.text
    if response.status_code != 200:
        assert response.status_code == 400, response.text
        assert streamed.json() == response.json()
        return []
    full, usage = of_full(response.json())
    choices, stream_usage = of_stream(events_of(streamed))
    assert [vars(choice) for choice in choices] == [vars(choice) for choice in full]
    assert stream_usage == (usage if options and options["include_usage"] else None)
    for choice in full:
        check(choice, body)
    return full


def check(choice: Choice, body: dict[str, Any]) -> None:
    """What holds of any choice."""
    assert choice.finish_reason in ("stop", "length", "tool_calls")
    assert (choice.finish_reason == "length") <= (choice.stop_reason is None)
    assert (choice.finish_reason == "tool_calls") <= bool(choice.calls)
    if choice.logprobs is not None:
        assert len({len(values) for values in choice.logprobs.values()}) == 1
    if choice.finish_reason == "tool_calls" and body["tool_choice"] not in (None, "auto"):  # forced
        assert all(isinstance(json.loads(call["arguments"]), dict) for call in choice.calls)
    is_form = choice.finish_reason == "stop" and choice.stop_reason is None and not choice.calls
    if is_form and not (body.get("echo") or body.get("include_stop_str_in_output")):
        assert_has_form(choice.text, body)
    for stop in body.get("stop") or ():
        is_free = body.get("min_tokens") or body.get("echo") or body.get("include_stop_str_in_output")
        assert is_free or stop not in choice.text


def assert_has_form(text: str, body: dict[str, Any]) -> None:
    """The text is what `response_format` or `structured_outputs` asks for, one of GRAMMARS."""
    if response_format := body.get("response_format"):
        is_any = response_format["type"] == "json_object"
        jsonschema.validate(json.loads(text), {"type": "object"} if is_any else SCHEMA)
    elif outputs := body.get("structured_outputs"):
        assert text in outputs["choice"] if "choice" in outputs else re.fullmatch(outputs["regex"], text)


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


words = st.sampled_from(["lift", " a ", "crème ", "缆车", "止", "\n", "🚠", "1 2 ", "<tool_call>", "</think>"])
prompts = st.lists(words | st.text(max_size=3), min_size=1, max_size=5).map("".join)
stops = st.sampled_from(["a", "e", " ", "th", "\ufffd", "lift", "</", "{", "好", "ab"])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"type": "integer", "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[a-c好 ]{2,6}"}},
    {"structured_outputs": {"choice": ["lift", "lifts", "好"]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
]
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 24),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "temperature": st.sampled_from([0, 0.7, 1, 3]),
    "top_p": optional(st.sampled_from([0.5, 0.95])),
    "top_k": optional(st.integers(1, 50)),
    "min_p": optional(st.sampled_from([0.0, 0.01])),
    "presence_penalty": optional(st.sampled_from([-1, 0.5])),
    "frequency_penalty": optional(st.sampled_from([-0.5, 1])),
    "repetition_penalty": optional(st.sampled_from([0.9, 1.3])),
    "stop": optional(st.lists(stops, max_size=3)),
    "include_stop_str_in_output": optional(st.booleans()),
    "min_tokens": optional(st.integers(0, 8)),
    "ignore_eos": optional(st.booleans()),
    "skip_special_tokens": optional(st.booleans()),
    "return_token_ids": optional(st.booleans()),
    "stream_options": optional(
        st.fixed_dictionaries({"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()})
    ),
}


def bodies(**own: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Requests of either route, some of which are refused."""
    free = st.just({})
    return st.builds(
        lambda body, grammar: body | grammar, st.fixed_dictionaries(COMMON | own), free | st.sampled_from(GRAMMARS)
    )


def with_ends(served: Served, body: dict[str, Any], bias: int) -> dict[str, Any]:
    """The same, with an end-of-text token that comes more or less often."""
    (end,) = served.tokenizer.eos_token_ids
    return body | {"logit_bias": {str(end): bias}}


@settings(max_examples=25)
@given(
    body=bodies(
        prompt=prompts | st.lists(prompts, min_size=1, max_size=2) | st.lists(st.integers(3, 399), min_size=1),
        max_tokens=st.integers(0, 24),
        echo=optional(st.booleans()),
        logprobs=optional(st.integers(0, 4)),
    ),
    bias=st.integers(0, 8),
)
def test_a_streamed_completion_is_the_full_one(served: Served, body: dict[str, Any], bias: int) -> None:
    assert_same(served, "/v1/completions", with_ends(served, body, bias))


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}},
        },
    }
    for name in ("f", "g")
]
THINKING = {
    "messages": [{"role": "user", "content": "lift"}, {"role": "assistant", "content": "<think>"}],
    "continue_final_message": True,
}
"""A conversation that has opened the thoughts."""
CHATS = bodies(
    messages=st.lists(prompts.map(lambda text: {"role": "user", "content": text}), min_size=1, max_size=2),
    max_tokens=st.integers(1, 40),
    logprobs=optional(st.booleans()),
    top_logprobs=optional(st.integers(0, 3)),
    tools=optional(st.just(TOOLS)),
    tool_choice=st.sampled_from([None, "none", "auto", "required", {"type": "function", "function": {"name": "g"}}]),
    parallel_tool_calls=optional(st.booleans()),
)


@settings(max_examples=40)
@given(
    body=CHATS,
    bias=st.integers(0, 8),
    pieces=st.lists(st.sampled_from(PIECES), max_size=6),
    is_thinking=st.booleans(),
    parsers=st.tuples(st.sampled_from(PARSERS), st.sampled_from(["none", "think"])),
)
def test_a_streamed_chat_is_the_full_one(
    served: Served,
    body: dict[str, Any],
    bias: int,
    pieces: list[str],
    is_thinking: bool,
    parsers: tuple[str, str],
) -> None:
    body = with_ends(served, body, bias)
    body["logit_bias"] |= {str(token_id): 6 for token_id in served.ids(*pieces)}  # about as likely as all else
    if is_thinking:
        body |= THINKING
    assert_same(served, "/v1/chat/completions", body, parsers)


FORCED = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


FORMS = dict(zip(("object", "regex", "choice", "schema", "call"), (*GRAMMARS, FORCED), strict=True))
QUICK = {("object", True), ("regex", False), ("choice", True), ("schema", False), ("call", True)}


@pytest.mark.parametrize(
    ("form", "is_thinking"),
    [
        pytest.param(
            form,
            is_thinking,
            id=f"{name}-{'thinking' if is_thinking else 'from the start'}",
            marks=[] if (name, is_thinking) in QUICK else [pytest.mark.slow],
        )
        for name, form in FORMS.items()
        for is_thinking in (False, True)
    ],
)
def test_a_form_is_asked_of_what_follows_the_thoughts(served: Served, form: dict[str, Any], is_thinking: bool) -> None:
    end, begin = served.ids("</think>", "<think>")
    body = {"n": 4, "seed": 3, "max_tokens": 150, "logprobs": True, "logit_bias": {str(end): 6, str(begin): 9}}
    body |= THINKING if is_thinking else {"messages": [{"role": "user", "content": "lift"}]}
    choices = assert_same(served, "/v1/chat/completions", body | form, ("none", "think"))
    ended = [choice for choice in choices if choice.finish_reason != "length"]
    assert ended
    assert any(choice.reasoning for choice in ended)
    assert all(not choice.text for choice in choices if choice.calls)
    stopped, _ = of_full(
        served.post("/v1/chat/completions", body | form | {"stop": "</think>"}, ("none", "think")).json()
    )
    assert {choice.text for choice in stopped if choice.stop_reason} == {""}  # in the thoughts, too
