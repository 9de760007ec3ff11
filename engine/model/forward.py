"""One forward pass of the model over a packed step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels import Kernels, to_device
from engine.kv.storage import KVStorage
from engine.model.attention import PagedInputs
from engine.model.batch import StepArrays

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class PagedForward:
    """A model, and what its attention needs in every step."""

    model: PreTrainedModel
    kernels: Kernels
    windows: Collection[int | None]
    """The windows of the model's layers; None is among them if a layer has none."""
    device: torch.device

    @torch.inference_mode()
    def __call__(self, step: StepArrays, storage: KVStorage) -> Tensor:
        """The logits [S + P, vocab_size] that the step wants. On an accelerator nothing waits for it."""
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
