"""What a decode step must read from memory, and how fast the device reads: together the least time a step can take."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.kernels.cpu.decoder import DecoderLayer
from engine.kernels.cpu.linear import PackedLinear
from engine.kv.storage import KVStorage
from engine.model.fused import FusedLayers, FusedLinear

PROBE_BYTES = 256 << 20
"""More than a last-level cache holds."""
ROUNDS = 5


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second: the best of a few sums over a large tensor, with torch's number of threads."""
    probe = torch.ones(PROBE_BYTES // 8, dtype=torch.int64, device=device)
    best_s = min(_seconds_to_read(probe) for _ in range(ROUNDS))
    return PROBE_BYTES / best_s


def _seconds_to_read(probe: Tensor) -> float:
    started = time.perf_counter()
    probe.sum().item()  # waits for the device
    return time.perf_counter() - started


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that each step reads: all but an embedding of which it takes a few rows.

    A mixture of experts reads some of its experts only: for such models this is too much.
    """
    rows_only = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    whole = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    tensors = [tensor for tensor in model.parameters() if tensor in whole or tensor not in rows_only]
    return sum(tensor.nbytes for tensor in tensors) + sum(_packed_bytes(linear) for linear in _packed(model))


def kv_bytes_per_token(storage: KVStorage) -> float:
    """Bytes of one token's keys and values in all layers, padding and scales included."""
    num_blocks = storage.keys[0].shape[0]
    total = sum(tensor.untyped_storage().nbytes() for tensor in (*storage.keys, *storage.values))
    return total / (num_blocks * storage.block_size)


def _packed(model: nn.Module) -> Iterator[PackedLinear]:
    """The packed linear layers, each once; a tied embedding reads rows of one of them."""
    for module in model.modules():
        if isinstance(module, FusedLinear):
            yield module.packed
        elif isinstance(module, FusedLayers):
            for layer in module.decoder.layers:
                yield from _linears(layer)


def _linears(layer: DecoderLayer) -> tuple[PackedLinear, ...]:
    return layer.query_key_value, layer.output, layer.gate_up, layer.down


def _packed_bytes(linear: PackedLinear) -> int:
    return linear.weight.nbytes + (0 if linear.scale is None else linear.scale.nbytes)
