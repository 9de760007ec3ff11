"""The modules that take the place of a model's own, and run in the C kernels. `fuse.py` puts them there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels import PackedStep
from engine.kernels.cpu.decoder import Angles, Decoder, DecoderLayer, Ends, Norm, StepInputs
from engine.kernels.cpu.linear import PackedLinear, gather_rows
from engine.kernels.cpu.pointwise import rms_norm
from engine.kv.storage import KVStorage
from engine.model.attention import PagedInputs


class FusedLayers(nn.Module):
    """The first of some joined decoder layers: computes all of them."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        super().__init__()
        self.decoder = Decoder(layers)

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        paged_inputs: PagedInputs,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> Tensor:
        """hidden_states [1, T, hidden_size]; the result is valid until the next step."""
        angles = None
        if position_embeddings is not None:
            cos, sin = (values[0].to(self.decoder.dtype).contiguous() for values in position_embeddings)
            angles = cos, sin
        inputs = StepInputs(angles, paged_inputs.slots, paged_inputs.plan, paged_inputs.storage.caches)
        return self.decoder(hidden_states[0], inputs).unsqueeze(0)


class FusedPass(nn.Module):
    """A whole forward pass as one call into C: embedding, layers, norm, logits."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        ends: Ends,
        *,
        embedding: nn.Module | None = None,
        angles: Angles | None = None,
    ) -> None:
        """`embedding`: where it is not among the ends; `angles`: of all positions, where layers are rotated."""
        super().__init__()
        self.decoder = Decoder(layers, ends=ends, angles=angles)
        self.embedding = embedding

    def forward(self, step: PackedStep, storage: KVStorage) -> Tensor:
        """float32 logits [L, vocab_size]; valid until the next step."""
        hidden = None if self.embedding is None else self.embedding(torch.from_numpy(step.token_ids))
        return self.decoder.logits(step, storage.caches, hidden)


class JoinedLayer(nn.Module):
    """A decoder layer that the one before it computes too."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """What the joined layers gave."""
        return hidden_states


class FusedLinear(nn.Module):
    """nn.Linear."""

    def __init__(self, packed: PackedLinear, *, float_output: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.float_output = float_output
        # empty: transformers' models find their dtype by looking for a parameter
        self.weight = nn.Parameter(torch.empty(0, dtype=packed.dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]; float32 with `float_output`."""
        return self.packed(x, float_output=self.float_output)


class FusedNorm(nn.Module):
    """RMSNorm."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same, normalised."""
        return rms_norm(x, self.norm.weight, self.norm.eps)[0]


class SharedEmbedding(nn.Module):
    """nn.Embedding over the packed weight of the output layer that it is tied to."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, ids: Tensor) -> Tensor:
        """int64 ids [...] -> [..., hidden_size]."""
        return gather_rows(self.packed, ids)
