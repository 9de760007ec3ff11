"""Models made to harm whoever serves them: nothing of theirs is run, and nothing is read but what lies with them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from config.schema import ModelConfig
from engine.errors import ModelError
from engine.model.loader import load_model
from engine.static import load_plain_model
from engine.text.tokenizer import Tokenizer
from tests import factories_text
from tests.factories_models import save_tiny_model, tiny_config

CONFIG = ModelConfig(device="cpu", dtype="float32", kernels="reference", num_threads=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    factories_text.hf_byte_level().save_pretrained(directory)
    return save_tiny_model(directory, tiny_config("llama"))


@pytest.fixture
def trap(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there when code of the model has run. Nobody is asked whether it may."""
    marker = tmp_path / "it ran"
    code = f"open({str(marker)!r}, 'w').close()\nclass Evil:\n    def __new__(cls, *a, **k): return cls\n"
    for directory in (path, path / "owner", path.parent):
        directory.mkdir(exist_ok=True)
        (directory / "evil.py").write_text(code)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    monkeypatch.chdir(path.parent)
    return marker


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# "owner/model--module.Class": code of another repository, which is looked for whatever directory is served.
@pytest.mark.parametrize("code", ["evil.Evil", "owner/model--evil.Evil", "..evil.Evil", "owner--evil.Evil"])
@pytest.mark.parametrize("model_type", ["llama", "nonsense"])
def test_code_that_a_config_names_is_not_run(path: Path, trap: Path, code: str, model_type: str) -> None:
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    edit(path / "config.json", model_type=model_type, auto_map=dict.fromkeys(classes, code))
    if model_type == "llama":  # what transformers has of its own goes before
        assert type(load_model(path, CONFIG).model).__module__.startswith("transformers.models.llama")
    else:
        with pytest.raises(ModelError):
            load_model(path, CONFIG)
    assert not trap.exists()


@pytest.mark.parametrize("code", ["evil.Evil", "owner/model--evil.Evil"])
def test_code_that_a_tokenizer_names_is_not_run(path: Path, trap: Path, code: str) -> None:
    file = path / "tokenizer_config.json"
    edit(file, auto_map={"AutoTokenizer": [code, code]}, tokenizer_class="Evil")
    try:
        tokenizer = Tokenizer.load(path)
    except ModelError:
        pass
    else:
        assert tokenizer.encode("ab", add_special_tokens=False)
    assert not trap.exists()


@pytest.mark.parametrize(
    "activation", ["os.system", "__import__('os').system", "evil.Evil", "../evil", "torch.load", "lambda x: x"]
)
def test_an_activation_is_a_name_in_a_list_not_a_path_to_code(path: Path, trap: Path, activation: str) -> None:
    edit(path / "config.json", hidden_act=activation)
    with pytest.raises(ModelError):
        load_model(path, CONFIG)
    assert not trap.exists()


class Payload:
    """Creates the file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt", "training_args.bin"])
def test_no_pickle_is_opened_whatever_it_is_called(path: Path, trap: Path, name: str) -> None:
    pickled = pickle.dumps({"weight": Payload(trap)})
    if name != "training_args.bin":
        (path / "model.safetensors").unlink()
    (path / name).write_bytes(pickled)
    if name == "training_args.bin":
        load_model(path, CONFIG)
    else:
        with pytest.raises(ModelError):
            load_model(path, CONFIG)
    assert not trap.exists()
    pickle.loads(pickled)["weight"].close()
    assert trap.exists(), "the pickle does no harm, and so shows nothing"


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "sub/x.bin"])
def test_an_index_names_files_of_its_directory_only(path: Path, name: str) -> None:
    weights = path / "model.safetensors"
    (path / "a").mkdir()
    (path / "sub").mkdir()
    for target in (path.parent / "outside.safetensors", path / "sub/x.bin"):
        target.write_bytes(weights.read_bytes())
    weights.unlink()
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"names .*, which is no safetensors file of its directory"):
        load_model(path, CONFIG)


@pytest.mark.parametrize(
    "index",
    ["[]", "{}", "3", "{", '{"weight_map": []}', '{"weight_map": 3}', '{"weight_map": {"w": ["a.safetensors"]}}'],
)
def test_an_index_that_is_none(path: Path, index: str) -> None:
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="is no index of weights"):
        load_model(path, CONFIG)


def test_the_plain_model_is_held_to_the_same(path: Path, trap: Path) -> None:
    """That of `chairlift explain` and `bench --static`."""
    (path / "model.bin").write_bytes(pickle.dumps({"weight": Payload(trap)}))
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model.bin"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="no safetensors file of its directory"):
        load_plain_model(path, torch.device("cpu"), torch.float32)
    assert not trap.exists()
