"""Values as people write them, and what a setting's metadata (`config.schema`) allows. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping

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


def format_bytes(count: int) -> str:
    """`count` bytes with the largest unit that leaves a number of at least 1: `4 GiB`, `1.5 GiB`, `300 B`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def parse_int(text: str) -> int:
    """A whole number. Raises ValueError saying so."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'"{text}" is not a whole number') from None


def check(value: object, rules: Mapping[str, object]) -> None:
    """Hold `value` against a field's metadata. Raises ValueError saying what would be right."""
    lowest, highest = rules.get("at_least"), rules.get("at_most")
    if isinstance(value, int):
        if isinstance(lowest, int) and isinstance(highest, int) and not lowest <= value <= highest:
            raise ValueError(f"{value} is not from {lowest} to {highest}")
        if isinstance(lowest, int) and value < lowest:
            raise ValueError(f"{value} is less than {lowest}")
    pattern = rules.get("pattern")
    if isinstance(pattern, str) and isinstance(value, str) and not re.fullmatch(pattern, value):
        raise ValueError(f'"{value}" is not {rules["expected"]}')
