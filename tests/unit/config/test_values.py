"""Values as people write them."""

from __future__ import annotations

from typing import Literal

import pytest

from config.values import did_you_mean, parse, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4GiB", 4 * 2**30),
        ("500MB", 500_000_000),
        ("1.5g", 3 * 2**29),
        ("2 t", 2 * 2**40),
        (".5k", 512),
        ("1.kib", 1024),
        ("9007199254740993", 2**53 + 1),  # beyond what a float holds
        (" 7 b ", 7),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 apples", "1e9", "4GiBs", "1.2.3", "0x10", "nan"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes such as 4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "hint", "rules", "value"),
    [
        ("7", int, {}, 7),
        ("0", int, {"at_least": 0, "at_most": 65535}, 0),
        ("65535", int, {"at_least": 0, "at_most": 65535}, 65535),
        ("1k", int, {"unit": "bytes", "at_least": 1}, 1024),
        ("TRUE", bool, {}, True),
        ("on", bool, {}, True),
        ("no", bool, {}, False),
        ("0", bool, {}, False),
        ("b", Literal["a", "b"], {}, "b"),
        ("any thing", str, {}, "any thing"),
        ("cuda:3", str, {"pattern": r"cpu|cuda(:\d+)?", "expected": "a device"}, "cuda:3"),
    ],
)
def test_parse(text: str, hint: object, rules: dict[str, object], value: object) -> None:
    assert parse(text, hint, rules) == value


@pytest.mark.parametrize(
    ("text", "hint", "rules", "message"),
    [
        ("1.5", int, {}, '"1.5" is not a whole number'),
        ("True", int, {}, '"True" is not a whole number'),
        ("0", int, {"at_least": 1}, "0 is not at least 1"),
        ("65536", int, {"at_least": 0, "at_most": 65535}, "65536 is not from 0 to 65535"),
        ("0", int, {"unit": "bytes", "at_least": 1}, "0 is not at least 1"),
        ("maybe", bool, {}, '"maybe" is not true or false'),
        ("flot32", Literal["auto", "float32"], {}, '"flot32" is not one of auto, float32 (did you mean float32?)'),
        ("zzz", Literal["auto", "float32"], {}, '"zzz" is not one of auto, float32'),
        (" ", str, {}, "it is empty"),
        ("gpu", str, {"pattern": r"cpu|cuda(:\d+)?", "expected": "cpu or cuda"}, '"gpu" is not cpu or cuda'),
        ("cuda:", str, {"pattern": r"cpu|cuda(:\d+)?", "expected": "cpu or cuda"}, '"cuda:" is not cpu or cuda'),
    ],
)
def test_parse_says_what_would_be_right(text: str, hint: object, rules: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        parse(text, hint, rules)
    assert str(caught.value) == message


def test_did_you_mean() -> None:
    assert did_you_mean("max_num_seq", ["port", "max_num_seqs"]) == " (did you mean max_num_seqs?)"
    assert did_you_mean("banana", ["port", "max_num_seqs"]) == ""
