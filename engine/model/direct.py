"""The forward pass of a causal language model whose decoder layers are one call.

Between two calls into C, a forward method of transformers builds masks' arguments, output objects and slices of lists.
On a CPU that costs more than it seems: a step reads all weights, so whatever Python touches is no longer in a cache.
Here is what such a forward pass comes to. Whether a model's is nothing else is seen in a watched pass, by the very
tensors that go from one module to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.attention import PagedInputs


@dataclass(frozen=True, slots=True)
class DirectForward:
    """embedding -> layers -> norm of the rows that are wanted -> logits."""

    embedding: nn.Module
    rotary: nn.Module | None
    """Gives the layers' angles, of hidden states (for their type) and position_ids; None if they take none."""
    layers: nn.Module
    norm: nn.Module
    output: nn.Module

    def __call__(
        self, *, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, paged_inputs: PagedInputs, **_: Any
    ) -> SimpleNamespace:
        """As the model's own forward is called by `PagedForward`, for its logits."""
        hidden = self.embedding(input_ids)
        angles = None if self.rotary is None else self.rotary(hidden, position_ids)
        hidden = self.layers(hidden, position_embeddings=angles, paged_inputs=paged_inputs)
        return SimpleNamespace(logits=self.output(self.norm(hidden[:, logits_to_keep])))


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def find_direct_forward(
    model: nn.Module, is_layers: Callable[[nn.Module], bool], forward: Callable[[], Tensor]
) -> DirectForward | None:
    """What `model` does in a pass, if that is nothing but such a chain.

    `is_layers`: whether a module computes decoder layers. `forward` runs a pass, for logits [rows, vocab_size].
    """
    calls: list[_Call] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(_Call(module, args, kwargs, output))

    hooks = [
        module.register_forward_hook(record, with_kwargs=True) for module in model.modules() if module is not model
    ]
    try:
        logits = forward()
    finally:
        for hook in hooks:
            hook.remove()
    return _chain([call for call in calls if call.args], is_layers, logits)


def _chain(calls: list[_Call], is_layers: Callable[[nn.Module], bool], logits: Tensor) -> DirectForward | None:
    layers = [call for call in calls if is_layers(call.module)]
    if len(layers) != 1:
        return None
    angles = layers[0].kwargs.get("position_embeddings")
    embedding = [call for call in calls if call.output is layers[0].args[0] and _takes_ids(call)]
    rotary = [call for call in calls if angles is not None and call.output is angles and _takes_positions(call)]
    norm = [call for call in calls if call.args[0] is layers[0].output]
    if len(embedding) != 1 or len(norm) != 1 or len(rotary) != (angles is not None):
        return None
    output = [call for call in calls if _gives(call, logits)]
    if len(output) != 1:
        return None
    return DirectForward(
        embedding=embedding[0].module,
        rotary=rotary[0].module if rotary else None,
        layers=layers[0].module,
        norm=norm[0].module,
        output=output[0].module,
    )


def _takes_ids(call: _Call) -> bool:
    return isinstance(call.args[0], Tensor) and call.args[0].dtype == torch.int64


def _takes_positions(call: _Call) -> bool:
    return len(call.args) + len(call.kwargs) == 2 and call.kwargs.keys() <= {"position_ids"}


def _gives(call: _Call, logits: Tensor) -> bool:
    is_alike = isinstance(call.output, Tensor) and call.output.shape == (1, *logits.shape)
    return is_alike and torch.equal(call.output[0], logits)
