"""One forward pass of the model over a packed step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.kernels import Kernels, PackedStep, to_device
from engine.kv.storage import KVStorage
from engine.model.attention import PagedInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Forward(Protocol):
    """A model, and a way to compute its logits."""

    @property
    def model(self) -> PreTrainedModel:
        """The model."""

    @property
    def device(self) -> torch.device:
        """Where it is."""

    def __call__(self, step: PackedStep, storage: KVStorage) -> Tensor:
        """The logits [L, vocab_size] that the step wants; valid until the next step. On an accelerator nothing waits
        for it."""


def make_forward(
    model: PreTrainedModel, kernels: Kernels, windows: Collection[int | None], device: torch.device
) -> Forward:
    """The shortest way there is. `windows`: see `PagedForward`."""
    whole = getattr(model, "fused_pass", None)
    return PagedForward(model, kernels, windows, device) if whole is None else WholeForward(model, whole, device)


@dataclass(frozen=True, slots=True)
class WholeForward:
    """A model that is one call (`fused.FusedPass`)."""

    model: PreTrainedModel
    whole: Callable[[PackedStep, KVStorage], Tensor]
    device: torch.device

    def __call__(self, step: PackedStep, storage: KVStorage) -> Tensor:
        """See `Forward`."""
        return self.whole(step, storage)


@dataclass(frozen=True, slots=True)
class PagedForward:
    """A model, and what its attention needs in every step."""

    model: PreTrainedModel
    kernels: Kernels
    windows: Collection[int | None]
    """The windows of the model's layers; None is among them if a layer has none."""
    device: torch.device

    @torch.inference_mode()
    def __call__(self, step: PackedStep, storage: KVStorage) -> Tensor:
        """See `Forward`."""
        inputs = PagedInputs(
            slots=to_device(step.slots, self.device),
            plan=self.kernels.plan_attention(step.rows, self.windows, self.device),
            storage=storage,
            kernels=self.kernels,
        )
        output = self.model(
            input_ids=to_device(step.token_ids, self.device).unsqueeze(0),
            position_ids=to_device(step.position_ids, self.device).unsqueeze(0),
            use_cache=False,
            logits_to_keep=to_device(step.logits_rows, self.device),
            paged_inputs=inputs,
        )
        logits: Tensor = output.logits[0]
        return logits
