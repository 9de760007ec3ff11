"""Which back end is taken, and what is said when it cannot be had."""

import logging

import pytest
import torch

from engine.errors import ConfigError
from engine.kernels import choose
from tests.cpu_kernels import build_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _built() -> None:
    build_kernels()


def test_auto_takes_the_c_kernels() -> None:
    assert choose("auto", CPU, torch.bfloat16, 32).NAME.startswith("cpu (")


def test_reference_on_request() -> None:
    assert choose("reference", CPU, torch.bfloat16, 32).NAME == "reference"


@pytest.mark.parametrize(
    ("dtype", "block_size", "reason"), [(torch.float16, 32, "float16"), (torch.float32, 8, "block_size")]
)
def test_what_the_c_kernels_cannot_do(
    dtype: torch.dtype, block_size: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for by name it is an error; `auto` says why it takes the reference."""
    with pytest.raises(ConfigError, match=reason):
        choose("cpu", CPU, dtype, block_size)
    with caplog.at_level(logging.WARNING):
        assert choose("auto", CPU, dtype, block_size).NAME == "reference"
    assert reason in caplog.text


def test_accelerators_have_the_reference() -> None:
    cuda = torch.device("cuda", 0)
    assert choose("auto", cuda, torch.bfloat16, 32).NAME == "reference"
    with pytest.raises(ConfigError, match="the model is on cuda:0"):
        choose("cpu", cuda, torch.bfloat16, 32)
