"""What a decoder layer is made of, read off its sub-modules: by structure and behaviour, never by the model's name.

Layers that are built like Llama's (also with biases, norms of each query and key head, norms after attention and MLP,
residual factors, projections already joined) become a `DecoderLayer` of the C kernels. Anything that has a part too
many is left alone. That a layer really computes what is read here is proved afterwards, on numbers: see `fuse`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels import AttentionOptions
from engine.kernels.cpu.decoder import DecoderLayer, Norm
from engine.kernels.cpu.linear import PackedLinear, can_pack, pack_gated, pack_linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}

PLAIN_NORMS = {"input_layernorm", "post_attention_layernorm"}
NORMS_AFTER_TOO = {*PLAIN_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"}


@dataclass(frozen=True, slots=True)
class SeenAttention:
    """How a layer called the attention function."""

    index: int
    """Of its cache."""
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    options: AttentionOptions


class Unfusable(Exception):
    """A module is built in a way that is not known here."""


def read_layer(module: nn.Module, seen: SeenAttention, *, int8: bool) -> DecoderLayer:
    """The layer with its weights packed, its heads not rotated: how they are cannot be read, only tried.

    Raises Unfusable; then nothing was packed yet.
    """
    parts = _parts(module)
    norms_after_too = set(parts) == {"self_attn", "mlp"} | NORMS_AFTER_TOO
    if not norms_after_too and set(parts) != {"self_attn", "mlp"} | PLAIN_NORMS:
        raise Unfusable
    attention, mlp = _parts(parts["self_attn"]), _parts(parts["mlp"])
    projections = _projections(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj", {"o_proj", "q_norm", "k_norm"})
    gates = _projections(mlp, ("gate_proj", "up_proj"), "gate_up_proj", {"down_proj", "act_fn", "activation_fn"})
    activation = read_activation(mlp.get("act_fn", mlp.get("activation_fn")))
    query_norm, key_norm = _head_norm(attention, "q_norm", seen), _head_norm(attention, "k_norm", seen)
    if (query_norm is None) != (key_norm is None) or (query_norm and key_norm and query_norm.eps != key_norm.eps):
        raise Unfusable
    norms = {name: read_norm(parts[name]) for name in (NORMS_AFTER_TOO if norms_after_too else PLAIN_NORMS)}
    o_proj, down_proj = _linear(attention.get("o_proj")), _linear(mlp.get("down_proj"))
    qkv_weights, qkv_biases = _weights(projections)
    gate_weights, gate_biases = _weights(gates)
    if len(gate_weights) == 1:
        gate_weights = list(gate_weights[0].chunk(2))
        gate_biases = [None, None] if gate_biases[0] is None else list(gate_biases[0].chunk(2))
    num_outputs = seen.num_heads * seen.key_dim + seen.num_kv_heads * (seen.key_dim + seen.value_dim)
    if sum(weight.shape[0] for weight in qkv_weights) != num_outputs:
        raise Unfusable
    return DecoderLayer(
        index=seen.index,
        num_heads=seen.num_heads,
        num_kv_heads=seen.num_kv_heads,
        key_dim=seen.key_dim,
        value_dim=seen.value_dim,
        options=seen.options,
        attention_norm=norms["input_layernorm"],
        query_key_value=pack_linear(qkv_weights, qkv_biases, int8=int8),
        query_norm=query_norm,
        key_norm=key_norm,
        rotation="none",
        output=pack_module(o_proj, int8=int8),
        mlp_norm=norms["pre_feedforward_layernorm" if norms_after_too else "post_attention_layernorm"],
        gate_up=pack_gated((gate_weights[0], gate_weights[1]), (gate_biases[0], gate_biases[1]), activation, int8=int8),
        down=pack_module(down_proj, int8=int8),
        norms_after=(norms["post_attention_layernorm"], norms["post_feedforward_layernorm"])
        if norms_after_too
        else None,
        residual_factor=float(getattr(module, "residual_multiplier", 1.0)),
    )


def read_norm(module: nn.Module) -> Norm:
    """An RMSNorm, whether it multiplies by its weight or by 1 + weight: what it does to numbers decides."""
    parameters = dict(module.named_parameters())
    eps = next((float(module.__dict__[name]) for name in ("variance_epsilon", "eps") if name in module.__dict__), None)
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or eps is None:
        raise Unfusable
    weight = parameters["weight"].detach().float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.numel(), generator=generator).to(parameters["weight"].dtype)
    with torch.inference_mode():
        got = module(x)
    if not isinstance(got, Tensor) or got.shape != x.shape:
        raise Unfusable
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    for factor in (weight, 1 + weight):
        if is_close(normed * factor, got.float(), x.dtype):
            return Norm(factor.contiguous(), eps)
    raise Unfusable


def read_activation(function: Any) -> str:
    """Which of ACTIVATIONS it is."""
    x = torch.linspace(-6, 6, 97)
    if callable(function):
        got = function(x)
        for name, known in ACTIVATIONS.items():
            if torch.allclose(known(x), got, rtol=1e-5, atol=1e-5):
                return name
    raise Unfusable


def pack_module(module: nn.Linear, *, int8: bool) -> PackedLinear:
    """An nn.Linear, packed."""
    return pack_linear([module.weight.detach()], [_bias(module)], int8=int8)


def is_close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to the rounding of numbers of type `dtype`; NaN is not."""
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    return bool((got - wanted).norm() <= tolerance * wanted.norm())


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """Sub-modules that do something in inference."""
    return {name: child for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def _projections(
    parts: dict[str, nn.Module], single: tuple[str, ...], joined: str, others: set[str]
) -> list[nn.Linear]:
    """Either the single projections or the joined one, and nothing beside them that is not among `others`."""
    for names in (single, (joined,)):
        if set(names) <= set(parts) <= {*names, *others}:
            return [_linear(parts[name]) for name in names]
    raise Unfusable


def _linear(module: nn.Module | None) -> nn.Linear:
    if type(module) is not nn.Linear or not can_pack(module.weight):
        raise Unfusable
    return module


def _weights(modules: list[nn.Linear]) -> tuple[list[Tensor], list[Tensor | None]]:
    return [module.weight.detach() for module in modules], [_bias(module) for module in modules]


def _bias(module: nn.Linear) -> Tensor | None:
    return None if module.bias is None else module.bias.detach()


def _head_norm(parts: dict[str, nn.Module], name: str, seen: SeenAttention) -> Norm | None:
    """The norm of each head; None if there is none."""
    if name not in parts:
        return None
    norm = read_norm(parts[name])
    if norm.weight.numel() != seen.key_dim:
        raise Unfusable
    return norm
