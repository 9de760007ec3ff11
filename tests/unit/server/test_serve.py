"""`chairlift serve`: what it warns of before the model loads."""

from __future__ import annotations

import pytest

from config.describe import assemble
from server.commands.serve import access_warnings


@pytest.mark.parametrize(
    ("per_key", "has_keys", "is_loopback", "warned_of"),
    [
        (False, False, True, []),
        (True, True, True, []),
        (False, True, False, []),
        (True, False, True, ["--prefix-cache-per-key does nothing without API keys"]),
        (False, False, False, ["THIS SERVER IS OPEN", "whoever reaches this address"]),
        (True, False, False, ["THIS SERVER IS OPEN", "whoever reaches this address", "--prefix-cache-per-key does"]),
    ],
)
def test_warnings(per_key: bool, has_keys: bool, is_loopback: bool, warned_of: list[str]) -> None:
    settings = assemble({"prefix_cache_per_key": per_key})
    warnings = access_warnings(settings, has_keys=has_keys, is_loopback=is_loopback)
    assert len(warnings) == len(warned_of)
    assert all(warning.startswith(beginning) for warning, beginning in zip(warnings, warned_of, strict=True))
