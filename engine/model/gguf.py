"""GGUF files, unpacked once into the directory of safetensors, config and tokenizer that every later start loads.

Transformers reads the file; what it gets wrong without a word is put right here. Parameters that the file lacks get
random numbers: that is an error. The text of some vocabularies is split otherwise than the model was trained with: see
`_DIGIT_BY_DIGIT`. Some releases take the wrong tokens for the end of text and its like: see `_SPECIAL_TOKENS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.model.gguf_header import check_header
from engine.progress import Progress

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

CONVERTER_VERSION = 1
"""Part of a converted model's name in the cache: raise it when the same file would now give another result."""

_DIGIT_BY_DIGIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of `tokenizer.ggml.pre` whose vocabularies have each digit alone, then split as GPT-2 does (llama.cpp,
`src/llama-vocab.cpp`). Transformers knows only the second half: without this "2024" would be one unknown piece."""

_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Transformers' and GGUF's names of the special tokens. Transformers 5.17 takes others than the file says."""


def convert_gguf(source: Path, target: Path, progress: Progress | None = None) -> None:
    """Write the model in the file `source` into the existing directory `target`, as transformers' `save_pretrained`.

    Needs memory for all weights at once. Raises ModelError when the file cannot be read, is of an architecture that
    transformers does not read from GGUF, or lacks weights or the tokenizer; OSError when `target` cannot be written.
    """
    report = progress or _ignore
    try:
        report(f"reading {source.name}")
        check_header(source)
        from gguf import GGUFReader

        header = GGUFReader(source)
        report(f"unpacking {source.name}")
        with _bars_to(report, f"unpacking {source.name}"):
            model = _load_model(source, _weight_dtype(header))
            tokenizer = _load_tokenizer(source, header)
    except ModelError:
        raise
    except Exception as error:  # whatever a damaged or foreign file makes the readers raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = "is it complete, and of an architecture that transformers reads from GGUF?"
        raise ModelError(f"cannot convert {source}: {reason}", setting="model", hint=hint) from error
    report("writing the unpacked weights")
    try:
        with _bars_to(report, "writing the unpacked weights"):
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except Exception as error:  # safetensors writes in Rust, and has an error of its own for a full disk
        raise OSError(str(error)) from error


def _ignore(stage: str, done: float | None = None) -> None:
    pass


def _weight_dtype(header: GGUFReader) -> torch.dtype:
    """The type to store the weights in: the file's own if it is a float type, else bfloat16.

    The rounding of bfloat16 (2**-9 of a weight) is well below the step of an 8-bit block, let alone a 4-bit one, and
    it halves the file and the time to load it. For the default model (4-bit blocks) it changes the loss on plain
    text by 0.0008 and the mean KL divergence of the next token is 7e-5 nats.
    """
    import torch

    elements: Counter[str] = Counter()
    for tensor in header.tensors:
        elements[tensor.tensor_type.name] += int(tensor.n_elements)
    if not elements:
        raise ModelError("the GGUF file holds no tensors", setting="model", hint="it may be a tokenizer-only file")
    [(kind, _)] = elements.most_common(1)
    return {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)


def _load_model(source: Path, dtype: torch.dtype) -> Any:
    """The model, all weights unpacked to `dtype`, as a plain model without a trace of its quantisation."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    model, info = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
        trust_remote_code=False,  # of a config that lies beside it
        output_loading_info=True,
    )
    missing = sorted({*info["missing_keys"], *info["mismatched_keys"]})
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of the model's weights, {missing[0]} for one",
            setting="model",
            hint="use the model's safetensors instead",
        )
    model.hf_quantizer = None  # save_pretrained refuses a model that it takes for quantised
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _load_tokenizer(source: Path, header: GGUFReader) -> Any:
    """The tokenizer with the chat template, split into words as the model was trained."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    if _field(header, "tokenizer.ggml.model") == "gpt2" and _field(header, "tokenizer.ggml.pre") in _DIGIT_BY_DIGIT:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    for ours, theirs in _SPECIAL_TOKENS.items():
        if (token_id := _field(header, f"tokenizer.ggml.{theirs}_token_id")) is not None:
            setattr(tokenizer, f"{ours}_token", tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.clean_up_tokenization_spaces = False  # it would take spaces out of the model's text
    return tokenizer


def _field(header: GGUFReader, name: str) -> Any:
    field = header.get_field(name)
    return None if field is None else field.contents()


@contextmanager
def _bars_to(report: Progress, stage: str) -> Iterator[None]:
    """Keep transformers' bars and warnings off the terminal, and give `report` the only bar that takes its time."""
    from transformers import modeling_gguf_pytorch_utils as unpacking
    from transformers.utils import logging

    def count(tensors: Sequence[Any], **_: object) -> Iterator[Any]:
        for index, tensor in enumerate(tensors):
            report(stage, index / len(tensors))
            yield tensor

    verbosity, bars, tqdm = logging.get_verbosity(), logging.is_progress_bar_enabled(), unpacking.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    unpacking.tqdm = count  # a bare tqdm, which `disable_progress_bar` does not reach
    try:
        yield
    finally:
        unpacking.tqdm = tqdm
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
