"""`chairlift bench` on a tiny random model: every figure is there, and they agree with each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from config.schema import CacheConfig, EngineConfig, ModelConfig
from engine.bench import memory
from engine.bench.parts import ATTENTION, LINEARS, NORMS
from engine.bench.requests import Request, run_all
from engine.bench.steps import REST, SAMPLING, SCHEDULER, measure_decode, model_runner
from engine.bench.suite import BenchSpec, run_bench
from engine.build import build_engine
from engine.core import EngineCore
from engine.errors import ConfigError
from server import cli
from tests.cpu_kernels import build_kernels
from tests.factories_models import save_tiny_model, tiny_config
from tests.factories_text import hf_byte_level

SMALL = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory, tiny_config("llama", vocab_size=512, hidden_size=64, max_position_embeddings=1024))
    hf_byte_level().save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PROBE_BYTES", SMALL)


def config_of(path: Path, kernels: str = "reference") -> EngineConfig:
    model = ModelConfig(model=str(path), device="cpu", kernels=kernels, dtype="float32", num_threads=1)
    return EngineConfig(model=model, cache=CacheConfig(kv_cache_tokens=2048))


def core_of(path: Path, kernels: str = "reference") -> EngineCore:
    if kernels == "cpu":
        build_kernels()
    return build_engine(config_of(path, kernels))[0]


def test_the_command_measures_all_and_writes_json(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    words = f"""bench --model {tiny} --device cpu --num-threads 1 --kv-cache-tokens 4096 --prompt-lens 8 32
        --rows 1 3 --context 40 --steps 4 --concurrency 2 --input-len 8 --output-len 4 --static --json {path}"""
    with pytest.raises(SystemExit) as end:
        cli.main(words.split())
    printed = capsys.readouterr()
    assert end.value.code == 0, printed.err
    assert "Prefill, one prompt at a time" in printed.out
    assert "static" in printed.out
    figures = json.loads(path.read_text())
    assert [run["num_tokens"] for run in figures["prefill"]] == [8, 32]
    assert [run["num_rows"] for run in figures["decode"]] == [1, 3]
    load, static = figures["load"][0], figures["static"][0]
    assert load["num_requests"] == static["num_requests"] == 8
    assert load["num_output_tokens"] == static["num_output_tokens"]
    assert load["output_tokens_per_s"] == pytest.approx(load["num_output_tokens"] / load["seconds"])


def test_only_what_is_asked_for_is_measured(tiny: Path) -> None:
    results = run_bench(config_of(tiny), BenchSpec(concurrency=(3,), input_len=6, output_len=3), lambda *_: None)
    assert (results.prefill, results.decode, results.static) == ([], [], [])
    assert results.continuous[0].num_requests == 9
    assert results.continuous[0].ttft_p50_s is not None


@pytest.mark.parametrize(
    ("kernels", "parts"),
    [
        ("reference", {LINEARS, ATTENTION, SAMPLING, SCHEDULER, REST}),
        ("cpu", {LINEARS, ATTENTION, NORMS, SAMPLING, SCHEDULER, REST}),
    ],
)
def test_the_parts_of_a_step(tiny: Path, kernels: str, parts: set[str]) -> None:
    core = core_of(tiny, kernels)
    run = measure_decode(core, 3, 40, num_steps=5, seed=1)
    assert run.parts_s.keys() == parts
    assert all(seconds > 0 for name, seconds in run.parts_s.items() if name != REST)
    assert run.roofline_share == pytest.approx(run.read_bytes / run.bandwidth / run.step_s)
    core.check_integrity()
    assert core.stats().num_used_blocks == 0


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_watching_leaves_no_trace(tiny: Path, kernels: str) -> None:
    """The same tokens before and after, and no clock left in the model."""
    core = core_of(tiny, kernels)
    request = Request(tuple(range(20)), 12)

    def tokens() -> list[object]:
        return [getattr(event, "token_ids", None) for report, _ in run_all(core, [request]) for event in report.events]

    before, forward = tokens(), model_runner(core).forward
    measure_decode(core, 2, 20, num_steps=2, seed=0)
    assert model_runner(core).forward is forward
    assert tokens() == before


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_bytes_that_a_step_reads(tiny: Path, kernels: str) -> None:
    """2 layers of 64 x 128 (q, k, v, o: 4, 2 and 2 heads of 8), an output layer; the embedding is read by rows."""
    runner = model_runner(core_of(tiny, kernels))
    config = runner.forward.model.config
    mlp = 3 * 64 * config.intermediate_size
    attention = 64 * 8 * (4 + 2 + 2 + 4)
    linear = 2 * (attention + mlp) + 64 * 512
    norms = 5 * 64
    read = memory.weight_bytes(runner.forward.model) / torch.float32.itemsize
    assert linear <= read <= linear + norms
    assert memory.kv_bytes_per_token(runner.storage) >= 2 * 2 * (8 + 8) * 4


@pytest.mark.parametrize(
    ("rows", "context", "words"), [(1, 2000, "context length"), (64, 200, "tokens of KV cache; it has 2048")]
)
def test_what_does_not_fit_is_refused(tiny: Path, rows: int, context: int, words: str) -> None:
    spec = BenchSpec(decode_rows=(rows,), context_len=context, num_steps=2)
    with pytest.raises(ConfigError, match=words):
        run_bench(config_of(tiny), spec, lambda *_: None)
