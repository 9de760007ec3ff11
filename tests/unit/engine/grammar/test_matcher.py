"""Grammars by what they let through, over small tokenizers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.grammar.matcher import CompiledGrammar, Matcher, Vocabulary, compile_grammar, explain, source_of
from engine.grammar.trial import GrammarError
from engine.params import FreePrefix, GrammarSpec
from engine.text.tokenizer import Tokenizer
from tests.factories_text import byte_level, sentencepiece, word_piece

VOCAB_SIZE = 453
"""Of the model: padded beyond the tokenizer's 401, and no multiple of 8."""

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["a"],
}


@cache
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.to_json(), vocab_size=VOCAB_SIZE, eos_token_ids=tokenizer.eos_token_ids)


def compiled(spec: GrammarSpec, tokenizer: Tokenizer | None = None) -> CompiledGrammar:
    return compile_grammar(source_of(spec), vocabulary_of(tokenizer or byte_level()))


def allowed(matcher: Matcher) -> set[int]:
    mask = matcher.mask()
    assert len(mask) == -(-VOCAB_SIZE // 8)
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


def lets_through(spec: GrammarSpec, text: str) -> bool:
    """Whether `text`, whole, is an output of the grammar: each token taken, then the end of the text allowed.

    All tokens that are allowed are taken. Where the text can go on in one way only, the mask may have just one of the
    tokens that begin it, and the others are taken all the same.
    """
    matcher = compiled(spec).start()
    for token_id in byte_level().encode(text):
        is_allowed = token_id in allowed(matcher)
        if not matcher.accept(token_id):
            assert not is_allowed
            return False
    return bool(byte_level().eos_token_ids & allowed(matcher))


def random_output(grammar: CompiledGrammar, tokenizer: Tokenizer, seed: int, max_tokens: int = 200) -> list[int] | None:
    """What a model without any idea writes; None if it does not come to an end."""
    numbers, matcher, output = random.Random(seed), grammar.start(), list[int]()
    while not matcher.is_finished and len(output) < max_tokens:
        token_id = numbers.choice(sorted(allowed(matcher)))
        assert matcher.accept(token_id)
        if token_id not in tokenizer.eos_token_ids:
            output.append(token_id)
    return output if matcher.is_finished else None


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        (GrammarSpec("json_object"), ['{}', '{"a": [1, {"b": null}], "c":"é\\n"}'], ["[]", "1", "{} ", ' {}', '{"a"}']),
        (GrammarSpec.json_schema(OBJECT), ['{"a": 1}', '{"a":-3,"b":[true, false],"c":0}'], ['{"a":"x"}', '{"b":[]}']),
        (GrammarSpec.json_schema({"enum": ["x", 2]}), ['"x"', "2"], ["x", "3"]),
        (GrammarSpec.json_schema({"type": "string", "format": "date"}), ['"2024-02-29"'], ['"today"']),
        (GrammarSpec.json_schema({"type": "string", "pattern": "^a+$"}), ['"aa"'], ['"b"', '""']),
        (GrammarSpec("regex", "[a-c]{2}x?"), ["ab", "cax"], ["a", "abxx", "dd"]),
        (GrammarSpec("regex", "好|é"), ["好", "é"], ["e", "你"]),
        (GrammarSpec.choice(["red", "reddish"]), ["red", "reddish"], ["redd", "green", ""]),
        (GrammarSpec("lark", 'start: "(" start? ")"'), ["()", "((()))"], ["(", "(()", ")("]),
    ],
)  # fmt: skip
def test_what_a_grammar_lets_through(spec: GrammarSpec, right: Sequence[str], wrong: Sequence[str]) -> None:
    assert [text for text in right if not lets_through(spec, text)] == []
    assert [text for text in wrong if lets_through(spec, text)] == []


FORMS = [
    (GrammarSpec("json_object"), '{"</think>": 1}', "[]"),
    (GrammarSpec.json_schema(OBJECT), '{"a": 1}', '{"a": "x"}'),
    (GrammarSpec("regex", "[a-c]{2}"), "ab", "abc"),
    (GrammarSpec.choice(["red", "reddish"]), "reddish", "redd"),
    (GrammarSpec("lark", 'start: "(" free ")"\nfree: /x+/'), "(xx)", "(y)"),
    (GrammarSpec.calls({"f": {}}, max_calls=1), '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {}}'),
]
THOUGHTS = ["", "Hm. </thin {\n缆车", '<think>{"a": 1}', "\n\n"]


@pytest.mark.parametrize(("spec", "right", "wrong"), FORMS, ids=[spec.kind for spec, _, _ in FORMS])
def test_what_a_prefix_holds_is_free_and_the_rest_is_not(spec: GrammarSpec, right: str, wrong: str) -> None:
    is_open = replace(spec, prefix=FreePrefix(end="</think>"))
    may_open = replace(spec, prefix=FreePrefix(begin="<think>", end="</think>"))
    for thoughts in THOUGHTS:
        assert lets_through(is_open, f"{thoughts}</think>{right}")
        assert lets_through(may_open, f"<think>{thoughts}</think>{right}")
        for text in (f"{thoughts}</think>{wrong}", f"{thoughts}</think> {right}", f"{thoughts}</think></think>{right}"):
            assert not lets_through(is_open, text)
            assert not lets_through(may_open, f"<think>{text}")
    assert lets_through(may_open, right)
    assert not lets_through(may_open, wrong)
    assert not lets_through(may_open, f"</think>{right}")
    assert not lets_through(is_open, "Hm.")


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_outputs_with_a_prefix_validate_behind_it(seed: int) -> None:
    prefix = FreePrefix(end="e")  # soon hit upon, also in the midst of tokens
    grammar = compiled(replace(GrammarSpec.json_schema(OBJECT), prefix=prefix))
    output = random_output(grammar, byte_level(), seed)
    if output is not None:
        _, end, form = byte_level().decode(output).partition("e")
        assert end
        jsonschema.validate(json.loads(form), OBJECT)


def test_whitespace_is_one_space_at_most_and_only_after_a_separator() -> None:
    spec = GrammarSpec("json_object")
    for text in ('{"a": 1, "b":2}', '{"a":1,"b": 2}'):
        assert lets_through(spec, text)
    for text in ('{ "a":1}', '{"a" :1}', '{"a":  1}', '{"a":1 }', '{\n"a":1}', '{"a":1,\n"b":2}', '{"a":\t1}'):
        assert not lets_through(spec, text)


@pytest.mark.parametrize(
    "text", ['{"a":1,"a":"x"}', '{"b":1,"a":"x"}', '{"a":1,"\\u0061":"x"}', '{"c":0,"\\u0061":"x"}']
)
def test_no_property_escapes_its_schema(text: str) -> None:
    assert not lets_through(GrammarSpec.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}), text)


@given(st.lists(st.text(max_size=6), min_size=1, max_size=4))
@example(["\U0001de0d"])  # its bytes are three tokens, of which the mask has the third in two pieces
@settings(max_examples=60)
def test_any_text_can_be_a_choice(choices: list[str]) -> None:
    spec = GrammarSpec.choice(choices)
    assert all(lets_through(spec, choice) for choice in choices)
    output = random_output(compiled(spec), byte_level(), seed=len(choices))
    assert output is not None
    assert byte_level().decode(output) in choices
    assert not lets_through(spec, "".join(choices) + "!")


CALLS = {
    "f": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"A": {"type": "integer"}},
    },
    "g.h": {"type": "object", "additionalProperties": False},
}


@pytest.mark.parametrize(
    ("text", "is_let_through"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', True),
        ('{"name": "g.h", "arguments": {}}', True),
        ('{"name": "f", "arguments": {"a": 1}}\n{"name": "g.h", "arguments": {}}', True),
        ('{"name": "g.h", "arguments": {}}\n' * 2 + '{"name": "g.h", "arguments": {}}', False),
        ('{"name": "f", "arguments": {"a": "x"}}', False),
        ('{"name": "f", "arguments": {}}', False),
        ('{"name": "g", "arguments": {}}', False),
        ('{"name": "f", "arguments": {"a":  1}}', False),
        ("", False),
    ],
)
def test_calls_with_references_each_to_its_own_schema(text: str, is_let_through: bool) -> None:
    assert lets_through(GrammarSpec.calls(CALLS, max_calls=2), text) == is_let_through
    assert lets_through(GrammarSpec.calls(CALLS, max_calls=1), text) == (is_let_through and "\n" not in text)


def test_a_schema_that_cannot_be_held_is_refused_within_calls_too() -> None:
    for schema in ({"type": "object", "minProperties": 5}, {"not": {"type": "object"}}):
        with pytest.raises(GrammarError):
            compiled(GrammarSpec.calls({"f": schema}, max_calls=1))


def test_nothing_but_the_end_may_follow_a_finished_output() -> None:
    matcher = compiled(GrammarSpec("regex", "ab?")).start()
    (a,), (b,) = byte_level().encode("a"), byte_level().encode("b")
    eos = byte_level().eos_token_ids
    assert matcher.accept(a)
    assert not matcher.is_finished
    assert allowed(matcher) == {b} | eos
    assert matcher.accept(b)
    assert matcher.is_finished
    assert allowed(matcher) == eos


def test_special_and_padded_tokens_are_never_allowed() -> None:
    tokenizer = byte_level()
    assert tokenizer.vocab_size < VOCAB_SIZE
    first = allowed(compiled(GrammarSpec("regex", r"(.|\n)*")).start())
    assert len(first) > 250
    assert max(first) < tokenizer.vocab_size
    assert first & tokenizer.special_token_ids == tokenizer.eos_token_ids


def test_a_vocabulary_smaller_than_the_tokenizers_is_cut() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer.to_json(), vocab_size=100, eos_token_ids=tokenizer.eos_token_ids)
    matcher = compile_grammar(source_of(GrammarSpec("regex", "[a-z]+")), vocabulary).start()
    assert len(matcher.mask()) == 13


def test_requests_of_one_grammar_do_not_meet() -> None:
    grammar = compiled(GrammarSpec("regex", "ab|cd"))
    one, other = grammar.start(), grammar.start()
    for token_id in byte_level().encode("c"):
        assert one.accept(token_id)
    assert allowed(one) == set(byte_level().encode("d"))
    assert allowed(other) & set(byte_level().encode("c"))


def test_a_token_that_is_not_allowed_is_an_error_that_stays() -> None:
    grammar = compiled(GrammarSpec("regex", "a"))
    matcher = grammar.start()
    assert matcher.error is None
    (b,) = byte_level().encode("b")
    assert not matcher.accept(b)
    assert matcher.error is not None
    assert "state" not in matcher.error
    assert not matcher.is_finished
    assert not any(matcher.mask())
    assert grammar.is_spent


def test_a_grammar_that_wants_too_much_ends_by_an_error_not_by_a_stall() -> None:
    """Its lexer has more states than it may: the number of ways in which the last 400 letters may have begun."""
    matcher = compiled(GrammarSpec("regex", "(.|\\n)*a(.|\\n){200}b(.|\\n){200}")).start()
    numbers = random.Random(0)
    while matcher.error is None and not matcher.is_finished:
        if not (choices := sorted(allowed(matcher) - byte_level().eos_token_ids)):
            break
        matcher.accept(numbers.choice(choices))
    assert matcher.error is not None
    assert "too many states" in matcher.error


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece(), sentencepiece(strip_space=False)], ids="bsg")
def test_whatever_a_tokenizer_writes_validates(tokenizer: Tokenizer) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "sizes": {"type": "array", "items": {"type": "integer", "minimum": -2, "maximum": 12}, "maxItems": 3},
            "kind": {"enum": ["é", "好", None]},
        },
        "required": ["name", "sizes", "kind"],
        "additionalProperties": False,
    }
    grammar = compiled(GrammarSpec.json_schema(schema), tokenizer)
    outputs = [random_output(grammar, tokenizer, seed) for seed in range(40)]
    complete = [output for output in outputs if output is not None]
    assert len(complete) > 30
    for output in complete:
        jsonschema.validate(json.loads(tokenizer.decode(output)), schema)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (GrammarSpec("regex", "(unclosed"), "unclosed group"),
        (GrammarSpec("regex", r"(?=x)x"), "look-around"),
        (GrammarSpec("regex", r"[^\s\S]"), "no text matches it"),
        (GrammarSpec("lark", "nonsense"), "Expected token"),
        (GrammarSpec("lark", "start: missing"), "missing"),
        (GrammarSpec("json_schema", "{"), "Expecting property name"),
        (GrammarSpec("json_schema", "[" * 5000), "recursion"),
        (GrammarSpec.json_schema({"type": "nonsense"}), "nonsense"),
        (GrammarSpec.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (GrammarSpec.json_schema({"$ref": "#/$defs/missing"}), "missing"),
        (GrammarSpec.json_schema({"$ref": "file:///etc/hostname"}), "does not fetch"),
        (GrammarSpec.json_schema({"type": "object", "minProperties": 2}), "minProperties"),
    ],
)
def test_what_cannot_be_held_is_refused_with_the_reason(spec: GrammarSpec, why: str) -> None:
    with pytest.raises(GrammarError, match=f"(?i){why}"):
        compiled(spec).start().mask()


def test_as_many_properties_as_are_sure_to_be_distinct_may_be_asked_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "minProperties": 2}
    assert lets_through(GrammarSpec.json_schema(schema), '{"a":null,"b":1}')
    assert not lets_through(GrammarSpec.json_schema(schema), '{"a":null}')


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    with pytest.raises(GrammarError, match="this model's tokenizer"):
        vocabulary_of(word_piece())


def test_long_errors_are_cut() -> None:
    assert len(explain("x" * 10_000)) < 600
    assert explain("short\n<non-verbose/>") == "short"
