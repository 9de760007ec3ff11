"""A request's body: bytes -> JSON -> a model of `server.protocol`. Every way in which that fails is a RequestError.

Bodies are read as JSON whatever their Content-Type says, as `curl -d` leaves it at that of a form.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import jiter
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.errors import RequestError
from server.errors import BodyTooLarge
from server.limits import MAX_MARKS, MAX_VALUES
from server.protocol.base import ApiModel
from server.unsupported import UNSUPPORTED, Unsupported, refuse_unsupported

_SHOWN_LEN = 200
"""Characters of the parser's words that are said."""

_LONGEST_NAME = 64
"""A field's name that is said although it may be none of ours, in bytes."""

_Model = TypeVar("_Model", bound=ApiModel)


async def read_body(request: Request, model: type[_Model], unsupported: Unsupported = UNSUPPORTED) -> _Model:
    """Read, parse and check the body. Raises RequestError, or BodyTooLarge or ClientDisconnect while reading.

    `unsupported`: the fields that the route refuses by name.
    """
    body = parse_object(await request.body())
    refuse_unsupported(body, unsupported)
    return validate(model, body)


def validate(model: type[_Model], value: Any, where: str = "") -> _Model:
    """`value` as a `model`. Raises RequestError; `where`: the value's place in the body, `input[2]`, say."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise explain(error, where) from None  # it holds the values, and so the prompt


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object; not NaN or Infinity, lone surrogates, or bytes that are not UTF-8, which strict JSON has not.

    Nor a name twice: two readers (a proxy that checks, a server that acts) would take two different values for it.
    The parser's own bounds are 200 levels of nesting and 4300 digits in a number; ours are MAX_MARKS and MAX_VALUES.
    """
    _check_marks(body)
    try:
        value = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        text = str(error)
        if len(text) > _SHOWN_LEN:  # it has a name of the client's in it
            text = f"{text[: _SHOWN_LEN - 50]} ... {text[-45:]}"
        field = _field_at(body, text)
        where = f", at {field}" if field else ""
        raise RequestError(f"the body is not valid JSON{where}: {text}", param=field, code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {_json_type(value)}", code="invalid_json")
    _check_values(value)
    return value


def _check_marks(body: bytes) -> None:
    """Arrays and objects take a hundred times the memory of the two bytes that say `[]`. Raises BodyTooLarge."""
    if len(body) > MAX_MARKS:
        for mark in (b"[", b"{", b":"):
            if (count := body.count(mark)) > MAX_MARKS:
                raise BodyTooLarge(f"the body has {count} times {mark.decode()}: at most {MAX_MARKS} are read")


_TOKEN_IDS = frozenset({"prompt", "tokens", "allowed_token_ids"})
"""Fields that may well hold a hundred thousand numbers. They are checked all at once, and have bounds of their own."""


def _check_values(body: dict[str, Any]) -> None:
    num_left = MAX_VALUES
    for name, value in body.items():
        rest = [] if name in _TOKEN_IDS else [value]
        while rest:
            part = rest.pop()
            if isinstance(part, dict | list):
                num_left -= len(part)
                if num_left < 0:
                    field = name if len(name) <= _LONGEST_NAME else None
                    message = f"{field or 'the body'} has too many values: a body may have {MAX_VALUES} in all"
                    raise RequestError(message, param=field, code="invalid_value")
                rest += part.values() if isinstance(part, dict) else part


_PLACE = re.compile(r"at line ([0-9]+) column ([0-9]+)$")
_MARK = re.compile(rb'"(?P<string>(?:[^"\\]|\\.)*+)(?:"(?P<is_name>\s*:)?|\Z)|[\[{]|[\]}]', re.DOTALL)
_MOST_MARKS = 100_000
"""Strings and brackets that are read to find a field: some 30 ms."""


def _field_at(body: bytes, problem: str) -> str | None:
    """The field in whose value the parser has stopped, as it says in `problem`. None: in none, or it is too far on."""
    if (place := _PLACE.search(problem)) is None:
        return None
    line, column = map(int, place.groups())
    if line > _MOST_MARKS:
        return None
    begin = 0
    for _ in range(line - 1):
        begin = body.find(b"\n", begin) + 1
    depth, field = 0, None
    for number, mark in enumerate(_MARK.finditer(body, 0, begin + column)):
        if number == _MOST_MARKS:
            return None
        if mark["string"] is None:
            depth += 1 if mark[0] in b"[{" else -1
        elif depth == 1 and mark["is_name"]:
            field = mark["string"]
    if depth < 1 or field is None or len(field) > _LONGEST_NAME:
        return None
    return field.decode(errors="replace")


def explain(error: ValidationError, where: str = "") -> RequestError:
    """The first thing that is wrong, with its field's name and what would be right."""
    details = error.errors(include_url=False)[0]
    name = _field_name(details["loc"], where)
    if details["type"] == "value_error":  # one of our own validators, which name the field themselves
        message = str(details["ctx"]["error"])
    elif details["type"] == "missing":
        message = f"{name} is required"
    elif details["type"] == "too_long":
        message = f"{name} may have {details['ctx']['max_length']} entries at most"
    else:
        message = f"{name} must be {_expected(details)}, got {_shown(details['input'])}"
    return RequestError(message, param=name, code="invalid_value")


def _field_name(loc: tuple[int | str, ...], name: str) -> str:
    """`messages[0].content`, say; `name` is what it begins with."""
    for part in loc:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "finite_json": "made of finite numbers",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "none_required": "null (it is not supported)",
}


_EXPECTED_LISTS = {
    "stop": "a string or an array of strings",
    "content": "a string or an array of text parts",
    "output": "a string or an array of text parts",
    "input": "a string or an array of items",
}
"""Lists that may be sent as one string."""


def _expected(details: ErrorDetails) -> str:
    if details["type"] == "float_type" and type(details["input"]) is int:
        return "a number of at most 1.8e308"
    if details["type"] == "literal_error":
        return str(details["ctx"]["expected"]).replace("False", "false")
    if details["type"] == "list_type" and details["loc"][-1] in _EXPECTED_LISTS:
        return _EXPECTED_LISTS[str(details["loc"][-1])]
    return _EXPECTED.get(details["type"], f"right: {details['msg']}")


def _shown(value: Any) -> str:
    """A value, if it is a word; else what kind it is, since it may be long."""
    return f'"{value}"' if isinstance(value, str) and 0 < len(value) <= 24 else _json_type(value)


def _json_type(value: Any) -> str:
    """A value's type, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}
    return names[type(value)]
