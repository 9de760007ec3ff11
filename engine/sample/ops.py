"""The sampler's arithmetic: pure functions on tensors, a row for each request, no row touching another.

Two ideas carry the speed. A vocabulary is looked at in blocks of 64 tokens first (their masses, their maxima), so that
what must be done in order (sums, searches) runs over a few hundred numbers instead of tens of thousands. And hardly a
row needs its whole vocabulary sorted (`ranking`): the 64 most likely tokens decide most rows (`leaders`, many rows at
once), and a histogram says which tokens do in the others (`shortlist`, one row).

The *ranking* of a row is: most probable first, equally probable ones by token id. Every filter keeps a prefix of it, so
all filters together are one number, the length of the shortest prefix (`kept`).

Bit for bit. On the CPU each result depends on its own row alone: softmax and sums run over one row in one order
whatever the number of rows, and sorting keys are unique, so no algorithm can order ties in its own way. Sums whose
order matters are in float64; a GPU may add them up in another order for another number of rows, which moves a result
by 1e-16.

Shapes: n rows, v vocabulary (padded to whole blocks), b = v / BLOCK. Probabilities are float32, not negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Tokens in a block."""
NUM_LEADERS = 64
"""Tokens that `leaders` ranks."""

_MAX_ID = 2**31 - 1
_BUCKET_SHIFT = 20  # leaves the exponent and three bits: buckets an eighth of an octave wide
_NUM_BUCKETS = 1 << (31 - _BUCKET_SHIFT)
_MAX_SHORTLIST = 8192  # beyond it, sorting everything by radix is faster


@dataclass(frozen=True, slots=True)
class Filters:
    """What each of n rows keeps of its ranking."""

    top_k: Tensor
    """int64 [n], from 1 to v; v keeps all."""
    top_p: Tensor
    """float64 [n], above 0, at most 1; 1 keeps all."""
    min_p: Tensor
    """float32 [n], from 0 to 1; 0 keeps all."""

    def select(self, rows: Tensor | slice) -> Filters:
        """The filters of these rows (int64 indices, or a slice)."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Ranked:
    """The first w tokens of each row's ranking."""

    probs: Tensor
    """float32 [n, w], falling."""
    token_ids: Tensor
    """int64 [n, w]."""
    cdf: Tensor
    """float64 [n, w]: the sum of `probs` up to and with each."""
    complete: bool
    """Whether all that top_k and min_p leave of each row is among them."""


def pad_to_blocks(logits: Tensor) -> Tensor:
    """Logits [n, vocabulary] -> [n, v]: tokens that do not exist are impossible."""
    missing = -logits.shape[-1] % BLOCK
    return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits


def blocks(rows: Tensor) -> Tensor:
    """[n, v] -> [n, b, BLOCK]."""
    return rows.reshape(len(rows), -1, BLOCK)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, v] -> most likely token (int64 [n], the lowest id of equals) and whether its logit is finite [n]."""
    peaks = blocks(logits).amax(-1)  # NaN if the block has one
    best_block = peaks.argmax(-1)
    best_inside = _pick(blocks(logits), best_block).argmax(-1)
    return best_block * BLOCK + best_inside, peaks.amax(-1).isfinite()


def probabilities(logits: Tensor, temperature: Tensor, *, in_place: bool = False) -> Tensor:
    """softmax(logits / temperature): float32 [n, v], float32 [n] -> [n, v]. All NaN where logits are not usable.

    `in_place` takes the logits' own memory to divide in: half of the time goes into fetching new one.
    """
    scaled = torch.div(logits, temperature[:, None], out=logits if in_place else None)
    return torch.softmax(scaled, dim=-1)


def block_cdf(probs: Tensor) -> Tensor:
    """Probabilities [n, v] -> float64 [n, b]: the mass of each row up to and with each block."""
    return blocks(probs).sum(-1).cumsum(-1, dtype=torch.float64)


def draw(probs: Tensor, cdf: Tensor, u: Tensor) -> Tensor:
    """Invert the distribution function, tokens in the order of their ids.

    `probs` [n, v], its `block_cdf` [n, b] and one number of (0, 1) per row (float64 [n]) -> token ids int64 [n].
    """
    target = u * cdf[:, -1]
    block = _search(cdf, target)
    upper = cdf.gather(1, block[:, None])[:, 0]
    lower = torch.where(block > 0, cdf.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = _pick(blocks(probs), block).cumsum(-1, dtype=torch.float64)
    # `inside` is summed in float64, the blocks' masses in float32: compare shares of the block, which cannot overshoot.
    share = (target - lower) / (upper - lower)
    return block * BLOCK + _search(inside, share * inside[:, -1])


def leaders(probs: Tensor) -> Ranked:
    """The NUM_LEADERS first tokens of each ranking. Needs v >= BLOCK * NUM_LEADERS."""
    values, token_ids = largest(probs, NUM_LEADERS)
    return _ranked(values, token_ids, complete=False)


def largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row: float32 [n, v] -> values falling, equals by id [n, count], and their ids.

    They lie in the `count` blocks that come first when blocks are ranked by their maximum: a block ranked before a
    value's own holds a value that is ranked before it.
    """
    peaks = blocks(rows).amax(-1)
    block_ids = torch.arange(peaks.shape[-1], device=rows.device).expand_as(peaks)
    _, block = _largest(peaks, block_ids, min(count, peaks.shape[-1]))
    candidates = (block[..., None] * BLOCK + torch.arange(BLOCK, device=rows.device)).flatten(1)
    return _largest(rows.gather(1, candidates), candidates, count)


def shortlist(probs: Tensor, mass: Tensor, filters: Filters) -> Ranked:
    """The start of one row's ranking (n is 1), just long enough for its filters to end in it. For the CPU."""
    vocab_size = probs.shape[-1]
    bucket = probs[0].view(torch.int32) >> _BUCKET_SHIFT  # monotone in the probability
    lowest = 0
    by_rank_or_ratio = bool(filters.top_k < vocab_size or filters.min_p > 0)
    if filters.top_k < vocab_size:
        lowest = _bucket_reaching(torch.bincount(bucket, minlength=_NUM_BUCKETS), int(filters.top_k))
    elif not by_rank_or_ratio:
        masses = torch.bincount(bucket, weights=probs[0].double(), minlength=_NUM_BUCKETS)
        lowest = _bucket_reaching(masses, float(filters.top_p * mass))
    chosen = (bucket >= lowest) & (probs[0] >= filters.min_p * probs.amax())
    token_ids = chosen.nonzero()[:, 0]
    if len(token_ids) > _MAX_SHORTLIST:
        return ranking(probs)
    order = probs[0, token_ids].sort(descending=True, stable=True).indices
    token_ids = token_ids[order][None]
    return _ranked(probs.gather(1, token_ids), token_ids, complete=by_rank_or_ratio)


def ranking(probs: Tensor) -> Ranked:
    """The whole ranking of each row."""
    # The bits of floats that are not negative order as the floats do. A stable sort leaves equals in order of id.
    keys = torch.iinfo(torch.int32).max - probs.view(torch.int32)
    if probs.device.type == "cpu":
        # torch sorts 32-bit integers of one dimension on the CPU by radix: ten times as fast as many rows at once.
        order = torch.stack([row.sort(stable=True).indices for row in keys])
    else:
        order = keys.sort(dim=-1, stable=True).indices
    return _ranked(probs.gather(1, order), order, complete=True)


def kept(ranked: Ranked, mass: Tensor, vocab_size: int, filters: Filters) -> tuple[Tensor, Tensor]:
    """How many tokens each row keeps (int64 [n], at least 1), and whether `ranked` is long enough to say (bool [n]).

    min_p and top_k look at the ranking of all tokens, top_p at the mass of what those two have left. `mass` is that of
    the whole row (float64 [n]); `vocab_size` is v.
    """
    width = ranked.probs.shape[-1]
    likely = ranked.probs >= filters.min_p[:, None] * ranked.probs[:, :1]
    left = torch.minimum(likely.sum(-1), filters.top_k).clamp(min=1)
    ends_here = (left < width) | (filters.top_k <= width) | ranked.complete
    mass_left = torch.where(ends_here, ranked.cdf.gather(1, left[:, None] - 1)[:, 0], mass)
    nucleus = torch.searchsorted(ranked.cdf, (filters.top_p * mass_left)[:, None])[:, 0] + 1
    only_top_p = (filters.top_k >= vocab_size) & (filters.min_p == 0)
    return torch.minimum(left, nucleus), ends_here | (only_top_p & (nucleus <= width))


def draw_ranked(ranked: Ranked, num_kept: Tensor, u: Tensor) -> Tensor:
    """Invert the distribution function over each row's first `num_kept` tokens, in order of rank -> token ids [n]."""
    last = num_kept[:, None] - 1
    target = u[:, None] * ranked.cdf.gather(1, last)
    rank = torch.minimum(torch.searchsorted(ranked.cdf, target, right=True), last)
    return ranked.token_ids.gather(1, rank)[:, 0]


def _ranked(probs: Tensor, token_ids: Tensor, *, complete: bool) -> Ranked:
    return Ranked(probs, token_ids, probs.cumsum(-1, dtype=torch.float64), complete)


def _bucket_reaching(buckets: Tensor, enough: float) -> int:
    """The highest bucket that, with all above it, adds up to enough."""
    from_the_top = buckets.flip(0).double().cumsum(0)
    above = int(torch.searchsorted(from_the_top, torch.tensor(enough, dtype=torch.float64)).item())
    return _NUM_BUCKETS - 1 - min(above, _NUM_BUCKETS - 1)


def _largest(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of float32 `values` [n, m], falling, equals by id; and their `ids`."""
    # Value and id in one integer: all keys differ, so the result does not depend on how topk treats equals.
    keys = (_ordered(values.view(torch.int32)).to(torch.int64) << 32) | (_MAX_ID - ids)
    keys = keys.topk(count, dim=-1).values
    return _ordered((keys >> 32).to(torch.int32)).view(torch.float32), _MAX_ID - (keys & _MAX_ID)


def _ordered(bits: Tensor) -> Tensor:
    """The bits of floats (int32) -> integers that order as the floats do, and back."""
    return bits ^ ((bits >> 31) & _MAX_ID)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in main memory, complete once the device's work up to here is done; itself if it lies there already."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _pick(blocked: Tensor, block: Tensor) -> Tensor:
    """One block of each row: [n, b, BLOCK] and int64 [n] -> [n, BLOCK]."""
    return blocked[torch.arange(len(block), device=block.device), block]


def _search(cdf: Tensor, target: Tensor) -> Tensor:
    """The first entry of each row of `cdf` [n, m] above `target` [n]; never past the end, even if all is NaN."""
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp(max=cdf.shape[-1] - 1)
