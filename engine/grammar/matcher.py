"""Which tokens may come next, by llguidance.

    GrammarSpec --source_of--> llguidance's own text --compile_grammar--> CompiledGrammar --start--> Matcher

llguidance knows each token's bytes, walks the vocabulary as a trie beside a lexer and an Earley parser, and so finds
the allowed tokens in some ten microseconds. What it may spend on one token is bounded (`LIMITS`); a grammar that wants
more fails its request.

What comes out validates. llguidance refuses schemas that it cannot hold (but for what `_check_schema` refuses), and
`JSON_OPTIONS` close what is left. Whitespace is at most one space after a colon or comma: small models, left free to
indent, go on with newlines to the end.

The package is imported by the first grammar: an engine that is asked for none runs without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engine.grammar.trial import GrammarError
from engine.params import FreePrefix, GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

LIMITS = {
    "step_lexer_fuel": 100_000,  # 7 ms, at worst, for one token
    "max_lexer_states": 50_000,  # 100 MB, at worst, for one grammar
    "verbose_errors": False,
}
"""llguidance's bounds, where they are not its own. Large real schemas need a tenth of these."""

JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "key_separator": ": ?",
    "item_separator": ", ?",
    "lenient": False,  # what it cannot hold is refused, not left out
    # Without \u escapes a text has one spelling: a property cannot escape its schema by spelling its name another way.
    "json_allowed_escapes": 'nrbtf\\"',
}

_FORM = "form"
"""What follows a prefix, for llguidance: a grammar of its own, so that its rules and lexemes stay its own."""

_MAX_ERROR_LEN = 500


def source_of(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own format. Raises GrammarError if it is not even JSON, say."""
    try:
        grammar = _grammar_of(spec)
    except (ValueError, RecursionError) as error:
        raise GrammarError(explain(str(error))) from error
    grammars = [grammar] if spec.prefix is None else [_prefix_as_grammar(spec.prefix), grammar]
    return json.dumps({"grammars": grammars})


def _grammar_of(spec: GrammarSpec) -> dict[str, Any]:
    """What follows the prefix, as a member of llguidance's list of grammars. Raises ValueError or RecursionError."""
    from llguidance import LLMatcher

    match spec.kind:
        case "json_object":
            return _only(LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_OPTIONS))
        case "json_schema":
            _check_schema(spec.text)
            return _only(LLMatcher.grammar_from_json_schema(spec.text, overrides=JSON_OPTIONS))
        case "regex":
            return _only(LLMatcher.grammar_from_regex(spec.text))
        case "choice":
            return _lark("start: " + " | ".join(json.dumps(text) for text in json.loads(spec.text)))
        case "lark":
            return _lark(spec.text)
        case "calls":
            _check_schema(spec.text)
            return _lark(_calls_as_lark(**json.loads(spec.text)))


def _only(source: str) -> dict[str, Any]:
    """The grammar of a source that llguidance has made."""
    (grammar,) = json.loads(source)["grammars"]
    return {**grammar, "name": _FORM}


def _lark(text: str) -> dict[str, Any]:
    return {"lark_grammar": text, "name": _FORM}


def _prefix_as_grammar(prefix: FreePrefix) -> dict[str, Any]:
    """Free text up to the first `end`, wherever it stands in a token, then the form."""
    begin = f"({json.dumps(prefix.begin)} free)?" if prefix.begin else "free"
    return {"lark_grammar": f"start: {begin} @{_FORM}\nfree[suffix={json.dumps(prefix.end)}]: /(?s:.*)/"}


def _calls_as_lark(schemas: dict[str, dict[str, Any]], max_calls: int) -> str:
    """Each schema is a grammar of its own, so that references within it hold."""
    more = f'("\\n" call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
    rules = [f"start: call {more}", "call: " + " | ".join(f"f{i}" for i in range(len(schemas)))]
    for i, (name, schema) in enumerate(schemas.items()):
        begin = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        rules += [f'f{i}: {begin} a{i} "}}"', f"a{i}: %json {json.dumps(schema | {'x-guidance': JSON_OPTIONS})}"]
    return "\n".join(rules)


_PLACE = re.compile(r"at (\d+)\(\d+\): (.*)")
"""Of what is wrong in a text in Lark. Behind it, lines of that text."""


def about(spec: GrammarSpec, message: str) -> str:
    """What is said of a grammar's source, as said of what its author wrote: of calls, the function whose schema it is.

    `_calls_as_lark` has that of the first function in line 4, and of each other one two lines below.
    """
    if spec.kind != "calls" or (place := _PLACE.match(message)) is None:
        return message
    names = list(json.loads(spec.text)["schemas"])
    index = min(max(int(place[1]) // 2 - 2, 0), len(names) - 1)
    return f"the parameters of {names[index]!r}: {place[2]}"


def explain(message: str) -> str:
    """What llguidance says of a grammar, in words, without its state, and not longer than anybody reads."""
    message = message.removesuffix("<non-verbose/>").strip()
    if message == "NoExtensionBias":
        message = "no text matches it"
    return message if len(message) <= _MAX_ERROR_LEN else message[:_MAX_ERROR_LEN] + " ..."


def _check_schema(text: str) -> None:
    """Refuse what llguidance takes but cannot hold: it counts the properties that are written, not the distinct ones.

    All those that are required are distinct, and one more is if there are any.
    """
    for schema in _schemas_in(json.loads(text)):
        required = schema.get("required")
        num_distinct = len(required) + 1 if isinstance(required, list) else 1
        least = schema.get("minProperties", 0)
        if isinstance(least, int | float) and least > num_distinct:
            raise ValueError(f"minProperties may be {num_distinct} at most, one more than are required, got {least}")


def _schemas_in(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value. Some of them may be no schemas."""
    open_values = [value]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            yield value
            open_values.extend(value.values())
        elif isinstance(value, list):
            open_values.extend(value)


class Vocabulary:
    """The model's tokens as llguidance needs them. Takes a second to make, and some 50 MB."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`tokenizer_json` as the Rust tokenizer writes it; `vocab_size` is the model's, which may be padded.

        Raises GrammarError for kinds of tokenizers that llguidance does not know.
        """
        import llguidance

        try:
            self.tokenizer = llguidance.LLTokenizer(tokenizer_json, eos_token=sorted(eos_token_ids) or None)
        except ValueError as error:
            raise GrammarError(f"this model's tokenizer is of a kind that it does not work with ({error})") from error
        self.mask_bytes = -(-vocab_size // 8)
        """Length of a mask."""


def compile_grammar(source: str, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compile `source_of` a grammar that has passed its trial. Raises GrammarError."""
    import llguidance

    limits = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)
    first = matcher.deep_copy()
    first.compute_bitmask()  # finds grammars that match nothing, and warms the lexer for the first request
    if first.is_error():
        raise GrammarError(explain(first.get_error()))
    return CompiledGrammar(matcher, vocabulary)


class CompiledGrammar:
    """A grammar, for any number of requests at once. See `engine.request.Grammar`.

    Its requests share the lexer, which grows as it meets new text, and so warm it for each other. Once it has grown
    to its bound it guides nobody any further: then the grammar `is_spent`, and has to be compiled anew.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.is_spent = False

    def start(self) -> Matcher:
        """The constraint of a new request; some ten microseconds."""
        return Matcher(self, self._matcher.deep_copy(), self._vocabulary)


class Matcher:
    """Where one request's output stands in its grammar. See `engine.request.Constraint`. One thread at a time."""

    def __init__(self, grammar: CompiledGrammar, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._vocabulary = vocabulary

    def mask(self) -> bytes:
        """See Constraint."""
        known = self._matcher.compute_bitmask()  # of the tokenizer's vocabulary, in whole words of 32 bits
        if self._has_failed():
            known = b""
        length = self._vocabulary.mask_bytes
        return known[:length].ljust(length, b"\0")

    def accept(self, token_id: int) -> bool:
        """See Constraint."""
        self._matcher.consume_token(token_id)
        return not self._has_failed()

    @property
    def is_finished(self) -> bool:
        """See Constraint."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """See Constraint."""
        return explain(self._matcher.get_error()) if self._matcher.is_error() else None

    def _has_failed(self) -> bool:
        self._grammar.is_spent |= self._matcher.is_error()
        return self._matcher.is_error()
