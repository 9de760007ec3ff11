"""The modules that take the place of a model's own, and run in the C kernels. `fuse.py` puts them there."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.cpu.decoder import Decoder, DecoderLayer, Ends, Norm, StepInputs
from engine.kernels.cpu.linear import PackedLinear, gather_rows
from engine.kernels.cpu.pointwise import rms_norm
from engine.model.attention import PagedInputs
from engine.model.rope import Angles


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
        cos, sin = position_embeddings or (None, None)
        storage = paged_inputs.storage
        inputs = StepInputs(
            cos=self._angles(cos),
            sin=self._angles(sin),
            slots=paged_inputs.slots,
            plan=paged_inputs.plan,
            keys=storage.keys,
            values=storage.values,
        )
        return self.decoder(hidden_states[0], inputs).unsqueeze(0)

    def _angles(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else values[0].to(self.decoder.dtype).contiguous()


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
        """`embedding`: where it is not among the ends; `angles`: where layers are rotated."""
        super().__init__()
        self.decoder = Decoder(layers, ends=ends)
        self.embedding = embedding
        self._angles = angles

    def forward(
        self, *, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, paged_inputs: PagedInputs, **_: Any
    ) -> SimpleNamespace:
        """As a causal language model's, for its logits: float32 [1, R, vocab_size].

        input_ids, position_ids: int64 [1, T]; logits_to_keep: int64 [R].
        """
        storage = paged_inputs.storage
        cos, sin = self._angles or (None, None)
        inputs = StepInputs(
            cos=cos,
            sin=sin,
            positions=position_ids[0],
            slots=paged_inputs.slots,
            plan=paged_inputs.plan,
            keys=storage.keys,
            values=storage.values,
        )
        x = input_ids if self.embedding is None else self.embedding(input_ids)
        return SimpleNamespace(logits=self.decoder.logits(x[0], logits_to_keep, inputs).unsqueeze(0))


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
