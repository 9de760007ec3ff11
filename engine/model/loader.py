"""From a local directory to a model that is ready to run: checked, on its device, attending to the paged cache."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from config.schema import ModelConfig
from engine import kernels
from engine.errors import ConfigError, ModelError
from engine.kernels import Kernels
from engine.machine import format_bytes
from engine.model import attention
from engine.model.device import free_memory, resolve_device, resolve_dtype, use_threads
from engine.model.families import check_config
from engine.model.forward import Forward, make_forward
from engine.model.probe import AttentionLayer, probe_model
from engine.model.rope import pin_rope, short_range
from engine.model.wide import affordable_linears
from engine.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    model: PreTrainedModel
    """In eval mode, on `device`; attends to the paged cache."""
    layers: tuple[AttentionLayer, ...]
    """By layer index."""
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    """Longest sequence, in tokens: what was asked for, else what the model was made for."""
    vocab_size: int
    """Logits of each token."""
    eos_token_ids: frozenset[int]
    """The tokens with which the model's makers say that it ends a text (generation config and config)."""
    num_parameters: int

    @property
    def forward(self) -> Forward:
        """The model's forward pass over packed steps."""
        return make_forward(self.model, self.kernels, {layer.window for layer in self.layers}, self.device)


def load_model(
    path: Path, config: ModelConfig, progress: Progress | None = None, *, block_size: int = 32
) -> LoadedModel:
    """Load the model in directory `path` (config.json and safetensors), for a KV cache of blocks of `block_size`.

    Call it in the thread that will run the model: it sets that thread's number of CPU threads.
    Raises ModelError when the model cannot be read or served, ConfigError when a setting cannot be honoured.
    """
    report = progress or _ignore
    report("reading the model's config")
    use_threads(config.num_threads)
    device = resolve_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for this thread: its streams and events are that device's
    fuses = config.fuse and kernels.has_cpu_kernels(config.kernels, device)
    dtype = resolve_dtype(config.dtype, device, fuses=fuses)
    model_config = _read_config(path)
    check_config(model_config)
    text_config = model_config.get_text_config(decoder=True)
    max_model_len = resolve_max_model_len(text_config, config.max_model_len)
    _check_memory(weight_files(path), dtype, device)
    attention.register()
    model = _read_weights(path, model_config, dtype, device, report)
    pin_rope(model, max_model_len)
    report("checking the model")
    back_end = kernels.choose(config.kernels, device, dtype, block_size)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with affordable_linears(device, dtype):
        layers = probe_model(model, back_end, max_model_len)
        _fuse(model, config, back_end, layers, max_model_len)
    return LoadedModel(
        model=model,
        layers=layers,
        kernels=back_end,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=text_config.vocab_size,
        eos_token_ids=_eos_token_ids(model),
        num_parameters=num_parameters,
    )


def _fuse(
    model: PreTrainedModel,
    config: ModelConfig,
    back_end: Kernels,
    layers: Sequence[AttentionLayer],
    max_model_len: int,
) -> None:
    """Replace modules by fused ones, if the back end has any. Raises ConfigError for a quantization without them."""
    from engine.kernels.cpu.back_end import CpuKernels

    if isinstance(back_end, CpuKernels) and config.fuse:
        from engine.model.fuse import fuse_model

        specs = [layer.spec for layer in layers]
        fuse_model(model, back_end, specs, max_model_len, int8=config.quantization == "int8")
    elif config.quantization != "none":
        raise ConfigError(
            f"quantization {config.quantization} needs the cpu kernels and fused modules",
            setting="quantization",
            hint="use --kernels cpu and --fuse, or --quantization none",
        )


def resolve_max_model_len(text_config: Any, asked: int | None) -> int:
    """The context length to serve. Raises ConfigError when more is asked for than the model was made for.

    Rotary embeddings that stretch with the length (`rope`) serve their short range unless more is asked for.
    """
    native = getattr(text_config, "max_position_embeddings", None)
    stretches_from = short_range(text_config)
    if asked is None:
        limits = [limit for limit in (native, stretches_from) if limit is not None]
        if not limits:
            raise ConfigError(
                "the model's config does not say how long its context is",
                setting="max_model_len",
                hint="set max_model_len",
            )
        return int(min(limits))
    goes_beyond = stretches_from == native  # dynamic NTK
    if native is not None and asked > native and not goes_beyond:
        raise ConfigError(
            f"max_model_len is {asked}, but the model was made for at most {native} tokens",
            setting="max_model_len",
            hint=f"use at most {native}",
        )
    return asked


def _ignore(stage: str, done: float | None = None) -> None:
    pass


def _read_config(path: Path) -> Any:
    """The transformers config in `path`."""
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no model: there is no config.json", setting="model")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"the config in {path} cannot be used: {text}",
            setting="model",
            hint="models that bring code of their own, or are newer than the installed transformers, are not served",
        ) from error


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that transformers will read. Raises ModelError if they are not all there, or are none."""
    index = path / "model.safetensors.index.json"
    names = _names_in(index) if index.is_file() else {"model.safetensors"}
    missing = sorted(name for name in names if not (path / name).is_file())
    if missing:
        raise ModelError(
            f"{path} lacks {', '.join(missing)}",
            setting="model",
            hint="weights are read from safetensors only; pickled ones (.bin, .pt) can run code on loading",
        )
    return [path / name for name in sorted(names)]


def _names_in(index: Path) -> set[str]:
    """The files that an index names. Transformers takes them for what their names say, pickles too, from anywhere."""
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"{index} is no index of weights: {error!r}", setting="model") from error
    for name in names:
        if not (isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name):
            message = f"{index} names {str(name)[:100]!r}, which is no safetensors file of its directory"
            raise ModelError(message, setting="model", hint="others are not read: they may run code, or be anybody's")
    return names


def _check_memory(files: list[Path], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a model whose weights do not fit, before gigabytes are read."""
    needed = sum(_num_elements(file) for file in files) * dtype.itemsize
    free = free_memory(device)
    if needed > free:
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"the model's weights take {format_bytes(needed)} in {kind}; {format_bytes(free)} are free on {device}",
            setting="model",
            hint="use a smaller model, or bfloat16 if it was float32" if dtype.itemsize > 2 else "use a smaller model",
        )


def _num_elements(file: Path) -> int:
    """Numbers in a safetensors file, from its header: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        try:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        except (ValueError, MemoryError, OverflowError) as error:
            raise ModelError(f"{file} is no safetensors file, or is cut short", setting="model") from error
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _read_weights(
    path: Path, config: Any, dtype: torch.dtype, device: torch.device, report: Progress
) -> PreTrainedModel:
    """The model with all its weights, with its own attention."""
    from transformers import AutoModelForCausalLM

    try:
        with _quietly_counting(lambda done: report("loading the model", done)):
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                device_map={"": device} if device.type == "cuda" else None,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"out of memory on {device} while loading the model", setting="device") from error
    except Exception as error:
        text = " ".join(str(error).split())
        raise ModelError(f"the model in {path} cannot be loaded: {text}", setting="model") from error
    absent = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if absent:
        raise ModelError(
            f"the weights in {path} are not those of its config: {len(absent)} are missing or of another shape, "
            f"such as {absent[0]}",
            setting="model",
        )
    return model.eval().requires_grad_(False)


@contextmanager
def _quietly_counting(report: Callable[[float], None]) -> Iterator[None]:
    """Turn transformers' progress bars into calls of `report` with the share that is done; errors alone are logged."""
    from transformers.utils import logging

    class Bar:
        def __init__(self, iterable: Any = (), *_: Any, **options: Any) -> None:
            self.iterable = iterable
            self.total = options.get("total") or (len(iterable) if hasattr(iterable, "__len__") else None)
            self.count = 0

        def __iter__(self) -> Iterator[Any]:
            for item in self.iterable:
                yield item
                self.update()

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: int = 1) -> None:
            self.count += count
            if self.total:
                report(min(self.count / self.total, 1.0))

    hook = logging.set_tqdm_hook(lambda _factory, args, options: Bar(*args, **options))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(hook)


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    ids: set[int] = set()
    for config in (model.generation_config, model.config, model.config.get_text_config(decoder=True)):
        found = getattr(config, "eos_token_id", None)
        ids.update(found if isinstance(found, list) else [] if found is None else [found])
    return frozenset(ids)
