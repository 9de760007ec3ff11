from __future__ import annotations

import numpy as np
import pytest

from engine.sample import random
from engine.sample.random import philox4x32, uniform


# Random123's tests/kat_vectors, its lines "philox4x32 10": counter, key, result.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, expected):
    columns = np.array([counter, counter], dtype=np.uint64).T, np.array([key, key], dtype=np.uint64).T
    assert philox4x32(*columns).T.tolist() == [expected, expected]


def test_a_number_is_a_function_of_its_seed_and_position():
    seeds, positions = [0, 1, 2**64 - 1, 2**32, 0], [5, 5, 5, 5, 2**40]
    numbers = uniform(seeds, positions)
    assert len(set(numbers)) == 5
    for number, seed, position in zip(numbers, seeds, positions, strict=True):
        assert uniform([seed], [position])[0] == number


def test_all_bits_of_seed_and_position_count():
    assert len({uniform([1 << bit], [0])[0] for bit in range(64)}) == 64
    assert len({uniform([0], [1 << bit])[0] for bit in range(64)}) == 64


def test_numbers_do_not_change():
    """What a seed gives is a promise to users: same seed, same text, also after an upgrade."""
    assert uniform([42, 42, 0], [0, 1, 0]).tolist() == [0.6129598811894158, 0.9877186509145105, 0.3990464708489646]


@pytest.mark.parametrize(("word", "expected"), [(0, 2.0**-53), (0xFFFFFFFF, 1 - 2.0**-53)])
def test_never_zero_and_never_one(monkeypatch, word, expected):
    monkeypatch.setattr(random, "philox4x32", lambda counter, key: np.full_like(counter, word))
    (number,) = uniform([0], [0])
    assert 0 < number < 1
    assert number == expected


@pytest.mark.parametrize("seeds", [[7] * 50_000, range(50_000)])
def test_numbers_are_spread_evenly(seeds):
    """Over the positions of one seed, and over the seeds at one position: chi-square of 64 equal bins, 99.99 %."""
    positions = range(50_000) if len(set(seeds)) == 1 else [3] * 50_000
    counts = np.bincount((uniform(seeds, positions) * 64).astype(int), minlength=64)
    expected = 50_000 / 64
    assert ((counts - expected) ** 2 / expected).sum() < 113.5
