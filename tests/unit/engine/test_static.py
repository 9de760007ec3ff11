"""Static batching against the same prompts alone, on tiny random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.static import StaticRequest, generate_in_waves, load_plain_model
from tests.factories_models import save_tiny_model, tiny_config

PROMPTS = [[5, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6], [8, 8, 6], [11, 12, 13, 14, 15]]
LENGTHS = [2, 9, 4, 1, 12]
CPU = torch.device("cpu")


@pytest.fixture(params=["llama", "gpt2", "mistral", "gemma2"])  # rotary, learned positions, windows, soft-capping
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path, tiny_config(request.param))


def requests() -> list[StaticRequest]:
    return [StaticRequest(prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]


def test_waves_give_what_each_prompt_gives_alone(directory: Path) -> None:
    model = load_plain_model(directory, CPU, torch.float32)
    alone = [generate_in_waves(model, [request], wave_size=1).outputs[0] for request in requests()]
    assert [len(output) for output in alone] == LENGTHS
    assert list(generate_in_waves(model, requests(), wave_size=2).outputs) == alone
    assert list(generate_in_waves(model, requests(), wave_size=5).outputs) == alone


def test_greedy_output_is_the_argmax_of_the_whole_text(directory: Path) -> None:
    model = load_plain_model(directory, CPU, torch.float32)
    output = generate_in_waves(model, requests(), wave_size=3).outputs[2]
    text = PROMPTS[2] + list(output)
    with torch.inference_mode():
        logits = model(torch.tensor([text])).logits[0]
    assert logits.argmax(-1).tolist()[len(PROMPTS[2]) - 1 : -1] == list(output)


def test_waves_are_as_long_as_their_longest(tmp_path: Path) -> None:
    model = load_plain_model(save_tiny_model(tmp_path, tiny_config("llama")), CPU, torch.float32)
    stages: list[tuple[str, float | None]] = []
    run = generate_in_waves(
        model, requests(), wave_size=2, progress=lambda stage, done=None: stages.append((stage, done))
    )
    assert [(wave.first, wave.num_rows, wave.padded_prompt_len, wave.num_steps) for wave in run.waves] == [
        (0, 2, 3, 9),
        (2, 2, 8, 4),
        (4, 1, 5, 12),
    ]
    times = [time for wave in run.waves for time in (wave.started_s, wave.first_token_s, wave.ended_s)]
    assert times == sorted(times)
    assert run.elapsed_s == times[-1]
    assert len(stages) == 9 + 4 + 12, "one report a step"
    assert stages[-1] == ("static batching", 1.0)


def test_the_models_own_generation_defaults_do_not_count(tmp_path: Path) -> None:
    config = tiny_config("llama")
    plain = load_plain_model(save_tiny_model(tmp_path / "plain", config), CPU, torch.float32)
    expected = generate_in_waves(plain, requests(), wave_size=2).outputs
    first = expected[1][0]
    directory = save_tiny_model(tmp_path / "with_defaults", config)
    (directory / "generation_config.json").write_text(
        f'{{"eos_token_id": {first}, "repetition_penalty": 5.0, "do_sample": true, "min_new_tokens": 3}}'
    )
    model = load_plain_model(directory, CPU, torch.float32)
    assert generate_in_waves(model, requests(), wave_size=2).outputs == expected
