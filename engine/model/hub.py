"""Models from the Hugging Face hub, into the cache that its other tools share."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.progress import Progress

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_NOT_FILES = ["*/*"]  # copies for other tools: onnx/, original/, openvino/


def download_from_hub(model: str, revision: str | None, progress: Progress | None, *, hint: str) -> Path:
    """Download the model with the id `model` and return its directory; without a network, use what is cached.

    Raises ModelError when there is no such id or revision, it is gated, or the hub is out of reach; `hint` is then
    what to try instead.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    stage = f"downloading {model}"
    if progress is not None:
        progress(stage)
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=_FILES,
                ignore_patterns=_NOT_FILES,
                tqdm_class=_bar_to(progress, stage),
            )
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{model} is gated", setting="model", hint="accept its terms on its page, then run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(f"there is no model {model} on the Hugging Face hub", setting="model", hint=hint) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{model} has no revision {revision}", setting="revision", hint="a branch, a tag or a commit"
        ) from error
    except LocalEntryNotFoundError as error:
        reason = _reason(error.__cause__ or error)
        message = f"{model} is not on this machine, and the Hugging Face hub did not give it: {reason}"
        raise ModelError(message, setting="model", hint=hint) from error
    except Exception as error:  # the HTTP client's errors (which client depends on the hub's version), a full disk
        raise ModelError(f"cannot download {model}: {_reason(error)}", setting="model", hint=hint) from error


def _reason(error: BaseException) -> str:
    """An error in a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _bar_to(progress: Progress | None, stage: str) -> type[Any]:
    """A tqdm class for `snapshot_download` that draws nothing and gives `progress` the share of bytes written."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"  # beside them there is one that counts files
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def display(self, *_: Any, **__: Any) -> None:
            if progress is not None and self._counts_bytes and self.n and self.total:
                progress(stage, min(self.n / self.total, 1.0))

    return Bar
