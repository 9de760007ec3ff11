"""Bodies: whatever is sent, the answer is a model or an error that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import RequestError
from server.body import _MOST_MARKS, explain, parse_object, validate
from server.protocol.base import ApiModel
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.tokenize import DetokenizeRequest


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "EOF"),
        (b"{", "EOF"),
        (b'{"a": 1,}', "trailing comma"),
        (b"{'a': 1}", "key must be a string"),
        (b'{"a": NaN}', "line 1"),
        (b'{"a": Infinity}', "line 1"),
        (b'{"a": -Infinity}', "line 1"),
        (b'{"a": "\xff"}', "invalid unicode"),
        (b'{"a": "\\ud800"}', "hex escape"),
        (b'{"a": "\\udc00 "}', "surrogate"),
        (b'{"a": 1} x', "trailing characters"),
        (b'{"a":' + b"[" * 100_000, "recursion limit"),
        (b'{"a":' + b"9" * 100_000 + b"}", "out of range"),
        ('{"a": 1}'.encode("utf-16"), "line 1"),
        (b'{"a": 1, "a": 1}', 'duplicate key "a"'),
        (b'{"a": {"b": 1, "c": 2, "\\u0062": 3}}', 'duplicate key "b"'),
    ],
)
def test_what_is_not_json_says_where(body: bytes, says: str) -> None:
    with pytest.raises(RequestError, match="the body is not valid JSON") as caught:
        parse_object(body)
    assert says in str(caught.value)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"prompt": "\xc3\xa9\xe7\xbc\x86", "temperature": NaN}', "temperature"),
        (b'{"top_p":Infinity,"seed":1}', "top_p"),
        (b'{"stop": ["a\\"b: {", "\\ud800"]}', "stop"),
        (b'{"user": "\xff"}', "user"),
        (b'{"tools": [{"x": {"messages": NaN}}]}', "tools"),
        (b'{"a": [[], {}],\n"b"\n: \n{"c": tru}}', "b"),
        (b'{"seed": 1, "n": 2, "seed": 3}', "seed"),
        (b'{"tools": {"b": 1, "b": 2}, "n": 1}', "tools"),
        (b'{"tools":' + b"[" * 300 + b"]" * 300 + b',"n":1}', "tools"),
        (b'{"n":' + b"9" * 5000 + b"}", "n"),
        (b'{"' + b"a" * 100 + b'": NaN}', None),
        (b'{"a": 1} "b": NaN', None),
        (b"NaN", None),
        (b'{"a": [' + b'"",' * 200_000 + b'1], "b": NaN}', None),
    ],
)
def test_what_is_not_json_says_in_which_field(body: bytes, field: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_object(body)
    assert caught.value.param == field
    assert (f"at {field}" in str(caught.value)) == (field is not None)


@pytest.mark.parametrize("filling", [b'"",', b'"\\\\",', b"[],"])
def test_a_field_is_looked_for_among_the_first_marks_only(filling: bytes) -> None:
    for number, field in ((1000, "a"), (2 * _MOST_MARKS, None)):
        with pytest.raises(RequestError, match="expected value") as caught:
            parse_object(b'{"a": [' + filling * number + b'NaN], "b": 1}')
        assert caught.value.param == field


def test_a_long_string_is_one_mark() -> None:
    with pytest.raises(RequestError, match="expected value") as caught:
        parse_object(b'{"a": ["' + b'\\"' * 2**21 + b'", NaN], "b": 1}')
    assert caught.value.param == "a"


@pytest.mark.parametrize("value", [1e999, {"a": [1.0, {"b": -1e999}]}, float("nan")])
def test_an_object_of_any_kind_has_finite_numbers(value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": value}}}
    error = error_of(ChatCompletionRequest, messages=[{"role": "user", "content": "x"}], tools=[tool])
    assert str(error) == "tools[0].function.parameters must be made of finite numbers, got an object"


@pytest.mark.parametrize(("field", "value"), [("echo", 0), ("echo", 0.0), ("best_of", True)])
def test_a_number_is_no_boolean_and_the_other_way_round(field: str, value: Any) -> None:
    error = error_of(ChatCompletionRequest, messages=[{"role": "user", "content": "x"}], **{field: value})
    assert error.param == field
    assert str(error).startswith(f"{field} must be {'false' if field == 'echo' else 1}, got ")


def test_a_name_that_is_there_twice_is_not_said_back_whole() -> None:
    name = b'"' + b"a" * 100_000 + b'"'
    with pytest.raises(RequestError, match="duplicate key") as caught:
        parse_object(b"{%s: 1, %s: 2}" % (name, name))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"null", "null"), (b"[]", "an array"), (b'"x"', "a string"), (b"1", "an integer"), (b"1.5", "a number")],
)
def test_json_that_is_no_object(body: bytes, kind: str) -> None:
    with pytest.raises(RequestError, match=f"the body must be a JSON object, got {kind}"):
        parse_object(body)


def test_text_of_all_kinds_is_taken() -> None:
    assert parse_object('{"a": "é 缆车 \\ud83d\\ude00 \\u0000"}'.encode()) == {"a": "é 缆车 😀 \0"}


def error_of(model: type[CompletionRequest | ChatCompletionRequest], /, **fields: Any) -> RequestError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    return explain(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", "5", 'max_tokens must be an integer, got "5"'),
        ("max_tokens", True, "max_tokens must be an integer, got true"),
        ("max_tokens", 5.5, "max_tokens must be an integer, got a number"),
        ("max_tokens", [5], "max_tokens must be an integer, got an array"),
        ("temperature", "x" * 100, "temperature must be a number, got a string"),
        ("temperature", False, "temperature must be a number, got false"),
        ("temperature", float("inf"), "temperature must be a finite number, got a number"),
        ("top_p", {}, "top_p must be a number, got an object"),
        ("stream", "true", 'stream must be true or false, got "true"'),
        ("stream", 1, "stream must be true or false, got an integer"),
        ("stop", 5, "stop must be a string or an array of strings, got an integer"),
        ("stop", ["a", 5], "stop[1] must be a string, got an integer"),
        ("logit_bias", {"5": "much"}, 'logit_bias.5 must be a number, got "much"'),
        ("logit_bias", {"5": None}, "logit_bias.5 must be a number, got null"),
        ("logit_bias", {"five": 1}, "logit_bias must have token ids as keys, got 'five'"),
        ("stop_token_ids", [1, None], "stop_token_ids[1] must be an integer, got null"),
        ("stream_options", [], "stream_options must be an object, got an array"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage must be true or false, got an integer"),
        ("stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation must be false, got true"),
        ("model", 5, "model must be a string, got an integer"),
        ("user", ["me"], "user must be a string, got an array"),
        ("prompt", None, "prompt must be a string, an array of strings, or token ids"),
        ("prompt", 5, "prompt must be a string, an array of strings, or token ids"),
        ("prompt", [], "prompt is an empty array: it needs at least one text or token id"),
        ("prompt", ["a", 1], "prompt must hold strings only, token ids only, or arrays of token ids only"),
        ("prompt", [1, True], "prompt must hold strings only, token ids only, or arrays of token ids only"),
        ("prompt", [1.5], "prompt must hold strings only, token ids only, or arrays of token ids only"),
        ("prompt", [[1], [2, "3"]], "prompt[1] must be an array of token ids, which are integers"),
        ("prompt", [["a"]], "prompt[0] must be an array of token ids, which are integers"),
    ],
)
def test_a_wrong_type_is_named_with_the_right_one(field: str, value: object, message: str) -> None:
    error = error_of(CompletionRequest, **({"prompt": "hi"} | {field: value}))
    assert str(error) == message
    assert (error.param or "").startswith(field)
    assert error.code == "invalid_value"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("hi", 'messages[0] must be an object, got "hi"'),
        ({"content": "hi"}, "messages[0].role is required"),
        ({"role": "asistant", "content": "hi"}, 'got "asistant"'),
        (
            {"role": "user", "content": 5},
            "messages[0].content must be a string or an array of text parts, got an integer",
        ),
        ({"role": "user", "content": ["hi"]}, 'messages[0].content[0] must be an object, got "hi"'),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text is required"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[0].content[0].type must be 'text', got \"image_url\"",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function is required"),
        ({"role": "assistant", "audio": {"id": "1"}}, "messages[0].audio must be null (it is not supported)"),
        ({"role": "assistant", "function_call": {}}, "messages[0].function_call must be null (it is not supported)"),
    ],
)
def test_a_wrong_message_is_named_by_its_place(message: object, says: str) -> None:
    error = error_of(ChatCompletionRequest, messages=[message])
    assert says in str(error)
    assert (error.param or "").startswith("messages[0]")


@pytest.mark.parametrize(("model", "field"), [(CompletionRequest, "prompt"), (ChatCompletionRequest, "messages")])
def test_what_is_required(model: type[CompletionRequest | ChatCompletionRequest], field: str) -> None:
    assert str(error_of(model)) == f"{field} is required"


def test_null_is_the_same_as_absent_everywhere_else() -> None:
    fields = dict.fromkeys(CompletionRequest.model_fields) | {"prompt": "hi"}
    assert CompletionRequest.model_validate(fields) == CompletionRequest(prompt=["hi"])


def test_unknown_fields_are_ignored() -> None:
    assert CompletionRequest.model_validate({"prompt": "hi", "made_up": 1}) == CompletionRequest(prompt=["hi"])


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
    ],
)
def test_the_forms_of_prompt(prompt: object, prompts: object) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompts


def test_an_error_does_not_hold_the_value() -> None:
    secret = "my secret prompt, " * 9
    error = error_of(ChatCompletionRequest, messages=secret)
    assert "secret" not in str(error)
    assert error.__cause__ is None


@pytest.mark.parametrize(
    "field", ["n", "seed", "top_k", "max_tokens", "min_tokens", "timeout_ms", "logprobs", "priority"]
)
def test_a_whole_float_is_an_integer(field: str) -> None:
    """As JSON Schema has it; JavaScript and Lua, among others, may write 1.0."""
    value = getattr(validate(CompletionRequest, parse_object(b'{"prompt": "a", "%s": 3.0}' % field.encode())), field)
    assert value == 3
    assert type(value) is int
    for wrong in (b"3.5", b'"3"', b"true"):
        body = parse_object(b'{"prompt": "a", "%s": %s}' % (field.encode(), wrong))
        with pytest.raises(RequestError, match=f"{field} must be an integer, got"):
            validate(CompletionRequest, body)


def test_whole_floats_are_integers_in_lists_too() -> None:
    body = {"prompt": [1.0, 2], "stop_token_ids": [3.0], "allowed_token_ids": [4.0, 5], "best_of": 2.0}
    request = validate(CompletionRequest, body)
    assert repr(request.prompt) == "[[1, 2]]"
    assert repr((request.stop_token_ids, request.allowed_token_ids, request.best_of)) == "([3], [4, 5], 2)"
    assert repr(validate(CompletionRequest, {"prompt": [[1.0], [2]]}).prompt) == "[[1], [2]]"
    assert repr(validate(DetokenizeRequest, {"tokens": [1.0, 2]}).tokens) == "[1, 2]"
    for prompt in ([1.5], [[1, 2.5]], [1e999], [1.0, "a"], [1.0, True]):
        with pytest.raises(RequestError, match="prompt"):
            validate(CompletionRequest, {"prompt": prompt})
    with pytest.raises(RequestError, match=r"stop_token_ids\[1\] must be an integer, got a number"):
        validate(CompletionRequest, {"prompt": "a", "stop_token_ids": [1.0, 1.5]})


@pytest.mark.parametrize(("name", "model"), [("best_of", ChatCompletionRequest), ("top_logprobs", CompletionRequest)])
def test_a_whole_float_is_the_one_integer_that_is_allowed(name: str, model: type[ApiModel]) -> None:
    least = {"prompt": "a"} if model is CompletionRequest else {"messages": [{"role": "user", "content": "a"}]}
    only = 1 if name == "best_of" else 0
    assert getattr(validate(model, least | {name: float(only)}), name) == only
    with pytest.raises(RequestError, match=name):
        validate(model, least | {name: only + 0.5})
