"""Grammars in a real engine over a tiny random model: whatever its logits, what ends with `stop` validates."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.schema import ModelConfig
from engine.client import AsyncEngine
from engine.core import EngineCore
from engine.grammar.compiler import GrammarCompiler, result_of
from engine.messages import Failed, Finished, TokensOut
from engine.model.loader import LoadedModel, load_model
from engine.params import GrammarSpec, SamplingParams
from engine.request import FinishReason
from tests.factories import make_submit
from tests.factories_engine import FakeEngine
from tests.factories_http import events_of, make_client
from tests.factories_models import save_tiny_model, tiny_config
from tests.factories_text import byte_level
from tests.integration.oracle import make_core

VOCAB_SIZE = 448
"""Padded: the tokenizer has 401."""
PROMPTS = [[60, 61, 62], [70] * 9, [80, 81], [90, 91, 92, 93, 94]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    config = tiny_config("llama", vocab_size=VOCAB_SIZE)
    path = save_tiny_model(tmp_path_factory.mktemp("model"), config)
    return load_model(Path(path), ModelConfig(device="cpu", dtype="float32", kernels="reference", num_threads=1))


@pytest.fixture(scope="module")
def compiler() -> Any:
    tokenizer = byte_level()
    made = GrammarCompiler(tokenizer.to_json, vocab_size=VOCAB_SIZE, eos_token_ids=tokenizer.eos_token_ids)
    yield made
    made.close()


def core_of(loaded: LoadedModel, *, num_blocks: int = 64, **scheduler: object) -> EngineCore:
    core = make_core(loaded, block_size=4, num_blocks=num_blocks, **scheduler)  # type: ignore[arg-type]
    core.info = replace(core.info, eos_token_ids=byte_level().eos_token_ids)
    return core


def generate(
    core: EngineCore, compiler: GrammarCompiler, requests: Sequence[tuple[list[int], SamplingParams]]
) -> tuple[list[tuple[list[int], FinishReason]], int]:
    """Tokens without the end of text, and how it ended, of each request; and the number of preemptions."""
    for i, (prompt, params) in enumerate(requests):
        spec = params.grammar
        grammar = None if spec is None else result_of(spec, compiler.compile(spec).result(60))
        core.submit(replace(make_submit(i, prompt), params=params, grammar=grammar))
    tokens: list[list[int]] = [[] for _ in requests]
    reasons: list[FinishReason | None] = [None] * len(requests)
    num_preempted = 0
    while core.has_work:
        report = core.step()
        assert report.stats is not None
        num_preempted += report.stats.num_preempted
        for event in report.events:
            assert not isinstance(event, Failed), event.error
            if isinstance(event, TokensOut):
                tokens[event.request_id].extend(event.token_ids)
            elif isinstance(event, Finished):
                reasons[event.request_id] = event.reason
                if event.stop_token_id is not None:
                    assert tokens[event.request_id].pop() == event.stop_token_id
    core.check_integrity()
    return [(ids, reason) for ids, reason in zip(tokens, reasons, strict=True) if reason is not None], num_preempted


scalars = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -7, "maximum": 120},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "string", "format": "date"},
        {"enum": ["x", "é", "好", 3, None]},
        {"const": {"a": [1]}},
    ]
)


def objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def make(properties: dict[str, Any], is_optional: bool) -> dict[str, Any]:
        required = list(properties)[is_optional:]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(make, st.dictionaries(st.sampled_from(["a", "b b", "é", '"']), values, max_size=3), st.booleans())


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 2)),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, scalars),
    ),
    max_leaves=5,
)


@settings(max_examples=25)
@given(
    schema=schemas, seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0, 5.0]), top_k=st.integers(0, 3)
)
def test_what_ends_with_stop_validates(
    loaded: LoadedModel, compiler: GrammarCompiler, schema: dict[str, Any], seed: int, temperature: float, top_k: int
) -> None:
    spec = GrammarSpec.json_schema(schema)
    requests = [
        (prompt, SamplingParams(max_tokens=70, seed=seed + i, temperature=temperature, top_k=top_k, grammar=spec))
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs, _ = generate(core_of(loaded, max_num_batched_tokens=8), compiler, requests)
    for tokens, reason in outputs:
        text = byte_level().decode(tokens, skip_special_tokens=False)
        if reason is FinishReason.STOP:
            jsonschema.validate(json.loads(text), schema)
        else:
            assert len(tokens) == 70


def test_most_outputs_of_small_schemas_do_end(loaded: LoadedModel, compiler: GrammarCompiler) -> None:
    """So that the test before this one says something."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    spec = GrammarSpec.json_schema(schema | {"additionalProperties": False})
    requests = [(PROMPTS[i % 4], SamplingParams(max_tokens=40, seed=i, grammar=spec)) for i in range(16)]
    outputs, _ = generate(core_of(loaded), compiler, requests)
    assert [reason for _, reason in outputs].count(FinishReason.STOP) >= 12


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    kinds = [
        None,
        GrammarSpec("json_object"),
        None,
        GrammarSpec("regex", "([a-z]{2} ){4}"),
        GrammarSpec.choice(["red", "reddish", "é好"]),
    ]
    return [
        (
            PROMPTS[i % 4],
            SamplingParams(max_tokens=24, seed=i, temperature=i % 3, grammar=kinds[i % 5], ignore_eos=True),
        )
        for i in range(10)
    ]


def test_rows_without_a_grammar_never_notice_those_with_one(loaded: LoadedModel, compiler: GrammarCompiler) -> None:
    requests = mixed_requests()
    together, _ = generate(core_of(loaded), compiler, requests)
    alone = [generate(core_of(loaded), compiler, [request])[0][0] for request in requests]
    assert together == alone


def test_preempted_requests_go_on_where_they_were(loaded: LoadedModel, compiler: GrammarCompiler) -> None:
    requests = mixed_requests()
    roomy, none = generate(core_of(loaded), compiler, requests)
    tight, num_preempted = generate(core_of(loaded, num_blocks=16, max_num_batched_tokens=12), compiler, requests)
    assert none == 0
    assert num_preempted > 0
    assert tight == roomy


def test_min_tokens_and_stop_tokens_work_beside_a_grammar(loaded: LoadedModel, compiler: GrammarCompiler) -> None:
    letters = GrammarSpec("regex", "[a-z]+")
    (z,) = byte_level().encode("z")
    params = SamplingParams(max_tokens=40, min_tokens=12, seed=1, temperature=3, stop_token_ids=(z,), grammar=letters)
    outputs, _ = generate(
        core_of(loaded), compiler, [(prompt, replace(params, seed=i)) for i, prompt in enumerate(PROMPTS)]
    )
    for tokens, _ in outputs:
        assert len(tokens) >= 12
        assert z not in tokens[:12]
        assert byte_level().decode(tokens).isalpha()


# --- Over HTTP ---

pytest_anyio = pytest.mark.anyio
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["chair", "lift"]}, "seats": {"type": "integer", "minimum": 1, "maximum": 8}},
    "required": ["kind", "seats"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
ROUTES = [("/v1/completions", {"prompt": "hi", "max_tokens": 60}), ("/v1/chat/completions", CHAT)]


@pytest.fixture
async def client(loaded: LoadedModel) -> AsyncIterator[httpx.AsyncClient]:
    engine = AsyncEngine(lambda: (core_of(loaded), byte_level()))
    await engine.load()
    async with make_client(cast(FakeEngine, engine)) as client:
        yield client
    await engine.close()


@pytest_anyio
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_choices_of_both_routes_and_modes_validate(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    asked = body | {"response_format": FORMAT, "n": 3, "seed": 5}
    full = (await client.post(path, json=asked)).json()
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in full["choices"]]
    assert [choice["finish_reason"] for choice in full["choices"]] == ["stop"] * 3
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in events_of(await client.post(path, json=asked | {"stream": True})):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    assert streamed == texts


@pytest_anyio
@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_cannot_be_held_is_a_bad_request(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    unsupported = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
    for param, value in (
        ("response_format.json_schema.schema", unsupported),
        ("structured_outputs.regex", {"regex": "("}),
    ):
        field = param.partition(".")[0]
        response = await client.post(path, json=body | {field: value, "stream": stream, "n": 2})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"


@pytest_anyio
@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]c"}, {"ac", "bc"}),
        ({"grammar": 'start: "(" ("x" | "y") ")"'}, {"(x)", "(y)"}),
        ({"json": {"const": [1, 2]}}, {"[1,2]", "[1, 2]"}),
    ],
)
async def test_structured_outputs(client: httpx.AsyncClient, kind: dict[str, Any], texts: set[str]) -> None:
    body = {"prompt": "hi", "max_tokens": 20, "temperature": 9, "n": 12, "structured_outputs": kind}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert {choice["text"] for choice in answer["choices"]} == texts
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
