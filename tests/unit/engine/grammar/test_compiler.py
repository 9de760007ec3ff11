"""The compiler's thread, its cache and the process in which grammars are tried, with grammars that mean harm."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.errors import EngineError, Overloaded, RequestError
from engine.grammar import compiler as compiler_module
from engine.grammar import trial
from engine.grammar.compiler import GrammarCompiler, result_of
from engine.grammar.matcher import CompiledGrammar
from engine.params import GrammarSpec
from tests.factories_text import byte_level, word_piece

TIMEOUT_S = 60.0
SLOW = GrammarSpec.json_schema({"type": "integer", "multipleOf": 99_999_989})
"""Compiles for minutes."""


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = make_compiler()
    yield made
    close(made)


def make_compiler(tokenizer_json: str | None = None) -> GrammarCompiler:
    tokenizer = byte_level()
    return GrammarCompiler(
        lambda: tokenizer_json or tokenizer.to_json(), vocab_size=401, eos_token_ids=tokenizer.eos_token_ids
    )


def close(compiler: GrammarCompiler) -> None:
    """Close it and see that it leaves nothing behind."""
    thread = compiler._thread
    compiler.close()
    if thread is not None:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert compiler._trial is None


def compile_(compiler: GrammarCompiler, spec: GrammarSpec) -> CompiledGrammar:
    return result_of(spec, compiler.compile(spec).result(TIMEOUT_S))


def regex(number: int) -> GrammarSpec:
    return GrammarSpec("regex", f"a{{{number}}}")


def refusal_of(compiler: GrammarCompiler, spec: GrammarSpec) -> str:
    with pytest.raises(RequestError) as caught:
        compile_(compiler, spec)
    assert caught.value.param == spec.param
    return str(caught.value)


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(GrammarSpec("regex", "a+", "response_format"))
    again = compiler.compile(GrammarSpec("regex", "a+", "structured_outputs"))
    assert again is first
    assert compiler.compile(GrammarSpec("lark", "a+")) is not first
    assert isinstance(first.result(TIMEOUT_S), CompiledGrammar)


def test_nothing_is_started_before_the_first_grammar() -> None:
    compiler = make_compiler()
    assert compiler._thread is None
    compiler.close()


def test_a_refusal_names_the_field_and_is_kept(compiler: GrammarCompiler) -> None:
    assert "unclosed group" in refusal_of(compiler, GrammarSpec("regex", "(", "structured_outputs"))
    kept = compiler.compile(GrammarSpec("regex", "(", "response_format"))
    assert kept.done()
    assert refusal_of(compiler, GrammarSpec("regex", "(", "response_format")).startswith("response_format cannot")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_refusal_of_calls_names_the_function_and_quotes_nothing_that_nobody_wrote(
    compiler: GrammarCompiler, index: int
) -> None:
    schemas: dict[str, Any] = {"first": {"type": "object"}, "second": {}, "third": {"const": 1}}
    name = list(schemas)[index]
    schemas[name] = {"type": 5}
    message = refusal_of(compiler, GrammarSpec.calls(schemas, max_calls=2, param="tools"))
    assert message.startswith(f"tools cannot be used: the parameters of '{name}': failed to compile")
    assert "x-guidance" not in message


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (SLOW, "more than 0.3 s"),
        (
            GrammarSpec("lark", "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(5000)), 'a5000: "x"'])),
            "deep",
        ),
        (
            GrammarSpec.json_schema(
                {
                    "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {}},
                    "$ref": "#/$defs/d0",
                }
            ),
            "deep",
        ),
    ],
    ids=["slow", "rules", "references"],
)
def test_a_grammar_that_would_hang_or_end_the_process_is_refused(
    compiler: GrammarCompiler, spec: GrammarSpec, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "CPU_S", 0.3)
    assert why in refusal_of(compiler, spec)
    process = compiler._trial
    assert compile_(compiler, regex(1)).start().mask()
    assert compiler._trial is process  # it lives


def test_what_explodes_only_later_is_let_in(compiler: GrammarCompiler) -> None:
    """Nested repeats compile at once; each of their tokens has its own bounds (see test_matcher)."""
    assert compile_(compiler, GrammarSpec("regex", "((a{0,100}){0,100}){0,100}"))


def test_memory_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MEMORY_BYTES", 12 * 2**20)  # 8 of them are the thread's stack
    many = GrammarSpec("regex", "|".join(f"w{i}x{i * 7}" for i in range(9000)))
    assert "more memory" in refusal_of(compiler, many)


def test_only_so_many_are_kept(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_GRAMMARS", 2)
    one, two = (compile_(compiler, regex(number)) for number in (1, 2))
    assert compile_(compiler, regex(1)) is one
    compile_(compiler, regex(3))
    assert compile_(compiler, regex(1)) is one
    assert compile_(compiler, regex(2)) is not two


def test_only_so_many_bytes_are_kept(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_(compiler, regex(1))
    many = compile_(compiler, GrammarSpec("regex", "|".join(f"w{i}x{i * 7}" for i in range(5000))))
    sizes = [entry.num_bytes for entry in compiler._entries.values()]
    assert sizes[1] > 2**20 > sizes[0]
    assert compile_(compiler, GrammarSpec("regex", "|".join(f"w{i}x{i * 7}" for i in range(5000)))) is many
    monkeypatch.setattr(compiler_module, "MAX_BYTES", 2**20)
    compile_(compiler, regex(2))
    close(compiler)  # it has tidied up
    assert [entry.spec for entry in compiler._entries.values()] == [regex(2)]


def test_a_spent_grammar_is_compiled_anew(compiler: GrammarCompiler) -> None:
    spent = compile_(compiler, regex(1))
    assert not spent.start().accept(0)
    assert spent.is_spent
    assert compile_(compiler, regex(1)) is not spent


def test_those_that_cannot_be_taken_in_are_sent_away(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, begun = threading.Event(), threading.Event()
    compile_one = GrammarCompiler._compile

    def held(self: GrammarCompiler, entry: compiler_module._Entry) -> compiler_module.Compiled:
        begun.set()
        assert release.wait(TIMEOUT_S)
        return compile_one(self, entry)

    monkeypatch.setattr(GrammarCompiler, "_compile", held)
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 2)
    futures = [compiler.compile(regex(1))]
    assert begun.wait(TIMEOUT_S)
    futures += [compiler.compile(regex(number)) for number in (2, 3)]
    with pytest.raises(Overloaded):
        compiler.compile(regex(4))
    assert compiler.compile(regex(3)) is futures[2]  # it waits already
    release.set()
    assert all(isinstance(future.result(TIMEOUT_S), CompiledGrammar) for future in futures)
    assert compile_(compiler, regex(4))


def test_a_process_that_was_killed_is_started_again(compiler: GrammarCompiler) -> None:
    compile_(compiler, regex(1))
    assert compiler._trial is not None
    os.kill(compiler._trial._process.pid, signal.SIGKILL)
    compiler._trial._process.wait(TIMEOUT_S)
    with pytest.raises(EngineError, match="has ended"):
        compile_(compiler, regex(2))
    assert compile_(compiler, regex(2))


def test_thread_and_process_end_when_idle(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "IDLE_S", 0.05)
    compiler.compile(regex(1))
    thread = compiler._thread
    assert thread is not None
    thread.join(TIMEOUT_S)
    assert compiler._thread is None
    assert compiler._trial is None
    assert compile_(compiler, regex(2))


def test_without_the_package_grammars_are_refused_and_nothing_else(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "llguidance is not installed" in refusal_of(compiler, regex(1))


def test_a_model_whose_tokenizer_is_not_understood_has_no_grammars() -> None:
    compiler = make_compiler(word_piece().to_json())
    assert "this model's tokenizer" in refusal_of(compiler, regex(1))
    assert "this model's tokenizer" in refusal_of(compiler, regex(2))
    close(compiler)
