"""Loading a directory, and what is said when it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.schema import ModelConfig
from engine.errors import ConfigError, ModelError
from engine.model import loader
from engine.model.loader import load_model, resolve_max_model_len
from tests.factories_models import save_tiny_model, tiny_config

CONFIG = ModelConfig(device="cpu", dtype="float32", kernels="reference", num_threads=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path, tiny_config("llama"))


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_is_loaded(path: Path) -> None:
    edit_json(path / "generation_config.json", eos_token_id=[5, 7])
    edit_json(path / "config.json", eos_token_id=3)
    loaded = load_model(path, CONFIG)
    assert loaded.num_parameters == sum(t.numel() for t in load_file(path / "model.safetensors").values())
    assert loaded.eos_token_ids == {3, 5, 7}
    assert (loaded.max_model_len, loaded.vocab_size) == (256, 128)
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert len(loaded.layers) == 2
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert torch.get_num_threads() == 1


def test_dtype(path: Path) -> None:
    loaded = load_model(path, ModelConfig(device="cpu", dtype="bfloat16", kernels="reference"))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


def test_sharded_weights(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    (path / "model.safetensors").unlink()
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, path / file, metadata={"format": "pt"})
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert load_model(path, CONFIG).num_parameters == sum(tensor.numel() for tensor in tensors.values())
    (path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks b\.safetensors"):
        load_model(path, CONFIG)


def test_progress(path: Path) -> None:
    reports: list[tuple[str, float | None]] = []
    load_model(path, CONFIG, lambda stage, done=None: reports.append((stage, done)))
    stages = list(dict.fromkeys(stage for stage, _ in reports))
    assert stages == ["reading the model's config", "loading the model", "checking the model"]
    shares = [done for stage, done in reports if stage == "loading the model" and done is not None]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_progress_bars_are_given_back(path: Path) -> None:
    from transformers.utils import logging

    load_model(path, CONFIG)
    assert logging.set_tqdm_hook(None) is None


class TestRefused:
    """Every message names what is wrong."""

    def refused(self, path: Path, message: str, config: ModelConfig = CONFIG) -> ConfigError:
        with pytest.raises(ConfigError, match=message) as caught:
            load_model(path, config)
        return caught.value

    def test_no_config(self, tmp_path: Path) -> None:
        assert isinstance(self.refused(tmp_path, r"no config\.json"), ModelError)

    def test_broken_config(self, path: Path) -> None:
        (path / "config.json").write_text("{")
        assert isinstance(self.refused(path, "config .* cannot be used"), ModelError)

    def test_unknown_family(self, path: Path) -> None:
        edit_json(path / "config.json", model_type="nonsense")
        assert "newer" in str(self.refused(path, "config .* cannot be used").hint)

    def test_code_of_its_own(self, path: Path) -> None:
        edit_json(path / "config.json", model_type="nonsense", auto_map={"AutoConfig": "evil.Config"})
        (path / "evil.py").write_text("raise SystemExit('run')")
        self.refused(path, "config .* cannot be used")

    def test_no_language_model(self, path: Path) -> None:
        edit_json(path / "config.json", model_type="vit")
        self.refused(path, "this vit model cannot be served: it is no causal language model")

    def test_pickled_weights_only(self, path: Path) -> None:
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
        assert "safetensors only" in str(self.refused(path, r"lacks model\.safetensors").hint)

    @pytest.mark.parametrize("size", [0, 4, 100, 1000])
    def test_cut_short(self, path: Path, size: int) -> None:
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])
        self.refused(path, "cut short")

    def test_cut_short_behind_the_header(self, path: Path) -> None:
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.refused(path, "cannot be loaded")

    def test_a_tensor_is_missing(self, path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        self.refused(path, r"1 are missing or of another shape, such as model\.norm\.weight")

    def test_a_tensor_of_another_shape(self, path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        tensors["model.norm.weight"] = torch.ones(7)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        self.refused(path, r"1 are missing or of another shape, such as model\.norm\.weight")

    def test_too_little_memory(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loader, "free_memory", lambda _: 50_000)
        error = self.refused(path, r"weights take 104\.6 KiB in float32; 48\.8 KiB are free on cpu")
        assert "bfloat16" in str(error.hint)

    def test_too_long(self, path: Path) -> None:
        error = self.refused(path, "made for at most 256", ModelConfig(device="cpu", max_model_len=1000))
        assert error.setting == "max_model_len"

    def test_no_context_length(self) -> None:
        with pytest.raises(ConfigError, match="does not say how long its context is"):
            resolve_max_model_len(SimpleNamespace(), None)
        assert resolve_max_model_len(SimpleNamespace(), 77) == 77
