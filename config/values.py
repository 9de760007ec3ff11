"""Values as people write them, and what a setting's metadata (`config.schema`) allows. Standard library only."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

_UNITS = {
    "": 1, "B": 1,
    "K": 2**10, "KIB": 2**10, "KB": 10**3,
    "M": 2**20, "MIB": 2**20, "MB": 10**6,
    "G": 2**30, "GIB": 2**30, "GB": 10**9,
    "T": 2**40, "TIB": 2**40, "TB": 10**12,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """`4GiB`, `500 MB`, `1.5g` or a plain number, in bytes. K, M, G and T alone are powers of 1024.

    Raises ValueError saying what would be right.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f'"{text}" is not a number of bytes such as 4GiB, 500MB or 1.5g')
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def parse(text: str, hint: Any, rules: Mapping[str, Any]) -> Any:
    """`text` as a value of the type `hint` (int, bool, str or a Literal of strings) that keeps a field's `rules`.

    Raises ValueError saying what would be right.
    """
    if typing.get_origin(hint) is Literal:
        return _choice(text, typing.get_args(hint))
    if hint is bool:
        return _switch(text)
    if hint is int:
        value = parse_bytes(text) if rules.get("unit") == "bytes" else _whole_number(text)
        _check_range(value, rules)
        return value
    if not text.strip():
        raise ValueError("it is empty")
    if "pattern" in rules and not re.fullmatch(rules["pattern"], text):
        raise ValueError(f'"{text}" is not {rules["expected"]}')
    return text


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'"{text}" is not a whole number') from None


def _check_range(value: int, rules: Mapping[str, Any]) -> None:
    lowest, highest = rules.get("at_least"), rules.get("at_most")
    if (lowest is not None and value < lowest) or (highest is not None and value > highest):
        allowed = f"at least {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise ValueError(f"{value} is not {allowed}")


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word in {"true", "on", "yes", "1"}:
        return True
    if word in {"false", "off", "no", "0"}:
        return False
    raise ValueError(f'"{text}" is not true or false')


def _choice(text: str, choices: Sequence[str]) -> str:
    if text in choices:
        return text
    raise ValueError(f'"{text}" is not one of {", ".join(choices)}{did_you_mean(text, choices)}')


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """` (did you mean X?)` for the known word that `word` is most like; nothing when it is like none.

    All begin with `prefix`, which does not count as likeness.
    """
    rests = [name.removeprefix(prefix) for name in known]
    close = difflib.get_close_matches(word.removeprefix(prefix), rests, n=1)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
