"""`chairlift explain` with real models: the default one, and a tiny random one that takes the built-in prompts fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from config.schema import EngineConfig, SchedulerConfig
from server import cli
from server.explain.jobs import DEFAULT_PROMPTS
from server.explain.run import compare
from server.explain.timeline import pick_steps
from tests.factories_models import save_tiny_model, tiny_config
from tests.factories_text import hf_byte_level

ROOT = Path(__file__).parents[2]
Explain = Callable[..., tuple[object, str, str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory, tiny_config("llama", vocab_size=512, max_position_embeddings=1024))
    hf_byte_level().save_pretrained(directory)
    return directory


def explain(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, its output not a terminal."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CHAIRLIFT_", "COLUMNS"))}
    return subprocess.run(
        [sys.executable, "-m", "server", "explain", *map(str, arguments)],
        cwd=ROOT,
        env=inherited,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def explain_here(capsys: pytest.CaptureFixture[str]) -> Explain:
    """The command in this process, which has imported torch already: exit status, stdout and stderr."""

    def run(*arguments: str | Path) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["explain", *map(str, arguments)])
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    return run


def test_the_command_explains_proves_and_draws(tiny: Path, tmp_path: Path, explain_here: Explain) -> None:
    status, text, errors = explain_here("--model", tiny, "--device", "cpu", "--save", tmp_path / "mask.png")
    assert status == 0, errors
    assert "Static batching: 480 steps" in text
    assert "D takes slot 1, which A left at step" in text
    assert "PREFILL(" in text
    assert "decode(1)" in text
    assert "Proved: both ways give the same 611 tokens." in text
    assert max(map(len, text.splitlines())) <= 100
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_takes_prompts_slots_and_a_budget(tiny: Path, tmp_path: Path, explain_here: Explain) -> None:
    prompts = [{"prompt": "Hello there, " * n, "max_tokens": 3 * n} for n in range(1, 5)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, prompts)))
    status, text, errors = explain_here(
        *("--model", tiny, "--device", "cpu", "--prompts-file", path, "--slots", "2", "--token-budget", "5")
    )
    assert status == 0, errors
    assert "4 prompts, 2 slots; " in text
    assert "5 tokens in one packed row" in text
    assert "Proved: both ways give the same 30 tokens." in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "./nowhere"), "./nowhere: no such file or directory"),
        (("--prompts-file", "none.jsonl"), "none.jsonl: No such file or directory"),
        (("--save", "picture.doc"), "no picture can be saved with this ending"),
        (("--slots", "0"), "slots"),
        (("--token-budget", "1000"), "token-budget"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], words: str, explain_here: Explain) -> None:
    status, text, errors = explain_here(*arguments)
    assert status in (1, 2)
    assert words in errors
    assert len(errors.splitlines()) == 1
    assert text == ""


def test_it_is_the_exit_status_of_the_process() -> None:
    result = explain("--slots", "0")
    assert result.returncode in (1, 2)
    assert "slots" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("share", [48, pytest.param(1, marks=pytest.mark.slow)])
def test_the_default_model_gives_the_same_tokens_both_ways(share: int) -> None:
    """With the command's own outputs, and always with shorter ones."""
    config = EngineConfig()
    config = replace(
        config,
        model=replace(config.model, dtype="float32"),
        cache=replace(config.cache, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16),
    )
    prompts = [(prompt, min(cap, 4 + cap // share)) for prompt, cap in DEFAULT_PROMPTS]
    comparison = compare(config, prompts, lambda stage, done=None: None)
    assert comparison.outputs_agree
    assert comparison.texts[0].startswith(" Paris")
    continuous = comparison.continuous_timeline
    assert len(pick_steps(continuous)) == 2
    assert continuous.admissions()[-1].num_cached_tokens == 16, "the last prompt begins like the third"
    assert continuous.num_computed < comparison.static_timeline.num_computed
