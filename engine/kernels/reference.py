"""The reference kernels: torch only, on any device, the definition of right.

Keys are gathered from the cache slot by slot into dense tensors, and attended to in *tiles*: a tile is either some
decoding rows, one query token each, or a stretch of one row's prompt. Rows of like context share a tile, so that little
is padded; a padding key is another one of the same row's, masked, so that a row never touches what is not its own.

Measured on CPU (2 cores with AVX-512 bf16, SmolLM2's 9 heads of 64 over 3 key heads, 30 layers, 32 rows x 200 keys):
gather and SDPA with a group's heads folded into the query 35 ms a step, SDPA with enable_gqa 204 ms, matmul and softmax
61 ms, a call for each row 136 ms. For prompts SDPA with enable_gqa is best, and its causal form better than a mask.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import AttentionOptions, IntArray, PackedRows, to_device
from engine.kernels.quantized import SCALE_BYTES, dequantize, quantize

NAME = "reference"
choose_tokens = None

MAX_TILE_KEYS = 16384
"""Most keys gathered for one tile of decoding rows; bounds memory, and larger tiles were no faster."""
MAX_TILE_QUERIES = 512
"""Most tokens of a prompt in one tile; bounds the mask and, where scores are explicit, the scores."""


@dataclass(frozen=True, slots=True)
class Tile:
    """n rows with m query tokens each, and the L keys that each row's tokens may see."""

    num_rows: int
    num_queries: int
    tokens: Tensor
    """int64 [n * m]: the packed positions of the query tokens."""
    slots: Tensor
    """int64 [n * L]: the cache slots of the keys."""
    mask: Tensor | None
    """bool [n, 1, m, L], True where a query sees a key; None: plain causal from the first key (m = L)."""


Plan = dict[int | None, tuple[Tile, ...]]
"""For each window of the model's layers, the tiles that cover the step."""


def plan_attention(rows: PackedRows, windows: Collection[int | None], device: torch.device) -> Plan:
    """See `Kernels`."""
    query_lens = np.diff(rows.query_starts)
    decoding, prefilling = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
    return {
        window: (
            *_decode_tiles(rows, decoding, window, device),
            *(tile for row in prefilling for tile in _prefill_tiles(rows, int(row), window, device)),
        )
        for window in windows
    }


def cache_dtypes(dtype: torch.dtype) -> Collection[torch.dtype]:
    """See `Kernels`."""
    return (dtype, torch.int8) if dtype.itemsize <= 2 else (dtype, torch.int8, torch.bfloat16)


def empty_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """See `Kernels`: [num_blocks, block_size, G, key_dim] and [num_blocks, block_size, G, value_dim].

    In int8 a head has four more: the bytes of its scale. On the CPU the system hands out the memory page by page, as
    blocks are first used.
    """
    shape = (num_blocks, block_size, num_kv_heads)
    extra = SCALE_BYTES if dtype == torch.int8 else 0
    key_dim, value_dim = (dim + extra for dim in dims)
    keys = torch.empty(*shape, key_dim, dtype=dtype, device=device)
    return keys, torch.empty(*shape, value_dim, dtype=dtype, device=device)


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `Kernels`."""
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.flatten(0, 1).index_copy_(0, slots, _to_store(new, cache.dtype))


def paged_attention(query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, options: AttentionOptions) -> Tensor:
    """See `Kernels`."""
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    explicit = options.softcap is not None or options.sinks is not None
    attend = _attend_explicitly if explicit else _attend
    value_dim = values.shape[-1] - (SCALE_BYTES if values.dtype == torch.int8 else 0)
    num_kv_heads = keys.shape[1]
    output = query.new_empty(query.shape[0], query.shape[1], value_dim)
    for tile in plan[options.window]:
        n, m = tile.num_rows, tile.num_queries
        q = query[tile.tokens].view(n, m, *query.shape[1:]).transpose(1, 2)  # [n, H, m, key_dim]
        k, v = (  # [n, G, L, key_dim], [n, G, L, value_dim]
            _stored(cache.index_select(0, tile.slots), query.dtype).view(n, -1, *dims).transpose(1, 2)
            for cache, dims in ((keys, (num_kv_heads, query.shape[2])), (values, (num_kv_heads, value_dim)))
        )
        output[tile.tokens] = attend(q, k, v, tile.mask, options).transpose(1, 2).flatten(0, 1)
    return output


def _to_store(new: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [T, G, dim] as they stand in a cache of this type."""
    if dtype != torch.int8:
        return new.to(dtype)
    small, scale = quantize(new)
    return torch.cat([small, scale.view(torch.int8)], dim=-1)


def _stored(found: Tensor, dtype: torch.dtype) -> Tensor:
    """What stands in a cache, [n, G, ...], as keys or values [n, G, dim] of this type."""
    if found.dtype != torch.int8:
        return found.to(dtype)
    scale = found[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return dequantize(found[..., :-SCALE_BYTES], scale, dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """[n, H, m, value_dim] by torch's own attention."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options.scale, enable_gqa=True)
    if q.shape[2] > 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=True)
    # One token a row: the heads of a group share its keys, so they stand as if they were tokens.
    folded = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=options.scale).flatten(1, 2).unsqueeze(2)


def _attend_explicitly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """[n, H, m, value_dim] step by step, for what torch's own attention lacks: soft-cap and sinks."""
    n, num_heads, m, key_dim = q.shape
    num_groups = k.shape[1]
    q = q.reshape(n, num_groups, num_heads // num_groups, m, key_dim)
    scores = (q @ k.unsqueeze(2).transpose(-1, -2)).float() * options.scale  # [n, G, H / G, m, L]
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is None:
        mask = torch.ones(m, m, dtype=torch.bool, device=q.device).tril()[None, None]
    scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, num_groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return (weights.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2)


def _decode_tiles(rows: PackedRows, decoding: IntArray, window: int | None, device: torch.device) -> Iterator[Tile]:
    """Tiles of the rows with one token, those of like context together."""
    num_keys = rows.context_lens[decoding]
    if window is not None:
        num_keys = np.minimum(num_keys, window)
    order = np.argsort(num_keys, kind="stable")
    decoding, num_keys = decoding[order], num_keys[order]
    start = 0
    while start < len(decoding):
        stop = start + 1
        while stop < len(decoding) and (stop + 1 - start) * num_keys[stop] <= MAX_TILE_KEYS:
            stop += 1
        yield _decode_tile(rows, decoding[start:stop], num_keys[start:stop], device)
        start = stop


def _decode_tile(rows: PackedRows, members: IntArray, num_keys: IntArray, device: torch.device) -> Tile:
    contexts = rows.context_lens[members]
    columns = np.arange(num_keys.max())
    mask = columns < num_keys[:, None]  # [n, L]
    positions = np.where(mask, columns + (contexts - num_keys)[:, None], contexts[:, None] - 1)
    return Tile(
        num_rows=len(members),
        num_queries=1,
        tokens=to_device(rows.query_starts[members], device),
        slots=to_device(_slots(rows, members[:, None], positions).reshape(-1), device),
        mask=to_device(mask[:, None, None, :], device),
    )


def _prefill_tiles(rows: PackedRows, row: int, window: int | None, device: torch.device) -> Iterator[Tile]:
    """Tiles of a row with several tokens, a stretch of tokens each."""
    first, last = int(rows.query_starts[row]), int(rows.query_starts[row + 1])
    shift = int(rows.context_lens[row]) - last  # from packed position to position in the sequence
    for start in range(first, last, MAX_TILE_QUERIES):
        stop = min(start + MAX_TILE_QUERIES, last)
        queries = np.arange(start, stop) + shift
        oldest = 0 if window is None else max(0, int(queries[0]) - window + 1)
        keys = np.arange(oldest, stop + shift)
        mask = None
        if len(keys) > len(queries) or (window is not None and window < len(keys)):
            distance = queries[:, None] - keys
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = to_device(seen[None, None], device)
        yield Tile(
            num_rows=1,
            num_queries=stop - start,
            tokens=torch.arange(start, stop, device=device),
            slots=to_device(_slots(rows, row, keys), device),
            mask=mask,
        )


def _slots(rows: PackedRows, row: int | IntArray, positions: IntArray) -> IntArray:
    """The cache slots of positions of rows (broadcast together)."""
    blocks, offsets = np.divmod(positions, rows.block_size)
    slots: IntArray = rows.block_tables[row, blocks] * rows.block_size + offsets
    return slots
