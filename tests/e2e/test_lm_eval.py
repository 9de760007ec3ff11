"""lm-evaluation-harness scores a task through the real process: its `local-completions` model, nothing of ours between.

It is not among the project's dependencies. In an environment of its own, without constraints.txt:

    python -m venv .venv-lm-eval
    .venv-lm-eval/bin/pip install -e '.[dev]' 'lm_eval[api]'
    .venv-lm-eval/bin/python -m pytest tests/e2e/test_lm_eval.py

The task is a YAML file with its questions beside it, so nothing is fetched. README has the command for real tasks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.model.resolve import resolve_model
from tests.e2e.process import Daemon

pytestmark = pytest.mark.slow

QUESTIONS = [
    ("The capital of France is", [" Paris", " Banana"]),
    ("Water is made of hydrogen and", [" oxygen", " trousers"]),
    ("The opposite of hot is", [" cold", " Tuesday"]),
    ("One, two, three,", [" four", " spoon"]),
]
TASK = """\
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
output_type: {output_type}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
KINDS = {
    "multiple_choice": "doc_to_choice: choices\ndoc_to_target: 0\n",
    "generate_until": 'doc_to_target: "{{choices[0]}}"\ngeneration_kwargs: {until: [" is"], max_gen_toks: 8}\n',
}


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("output_type", list(KINDS))
def test_a_task_is_scored(daemon: Daemon, tmp_path: Path, output_type: str, batch_size: int) -> None:
    pytest.importorskip("lm_eval")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": q, "choices": c}) + "\n" for q, c in QUESTIONS))
    (tmp_path / "tiny.yaml").write_text(TASK.format(questions=questions, output_type=output_type) + KINDS[output_type])
    model_args = {
        "model": "smollm2",
        "base_url": f"{daemon.url}/v1/completions",
        "tokenizer": resolve_model("smollm2", revision=None, cache_dir=None, progress=None),
        "tokenizer_backend": "huggingface",
        "max_retries": 1,
    }
    harness = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "tiny"),
            *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())),
            *("--batch_size", str(batch_size)),
        ],
        env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert harness.returncode == 0, harness.stderr
    samples = samples_of(tmp_path / "out")
    assert len(samples) == len(QUESTIONS)
    if output_type == "multiple_choice":
        assert [sample["acc"] for sample in samples] == [1.0] * len(QUESTIONS)  # such a model knows as much
    else:
        assert all(sample["resps"][0][0] for sample in samples)
        assert all(" is" not in sample["resps"][0][0] for sample in samples)


def samples_of(directory: Path) -> list[dict[str, Any]]:
    """What the harness says of each question."""
    (path,) = directory.rglob("samples_tiny_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
