"""Logprobs: how likely the model found a token, its rank, and which tokens it found likelier.

They are those of the *raw* logits, before masks, bias, penalties and temperature: vLLM's default (`raw_logprobs`). So
they say what the model thinks whatever the request does with it, and a token of a prompt gets the number that it would
have got in the output.

Each result depends on its own row alone, bit for bit on the CPU (see `ops`). Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.plan import TokenLogprobs
from engine.sample import ops

LEAST = -9999.0
"""Stands for minus infinity, and for anything below it: JSON has no infinities."""

_ROWS_AT_ONCE = 64  # so that scoring a prompt takes little memory beside its logits


@dataclass(frozen=True, slots=True)
class Scores:
    """What n rows of logits say of one token each, and of the k likeliest."""

    token_ids: Tensor
    """int64 [n]."""
    logprobs: Tensor
    """float32 [n]; NaN where the logits were not usable."""
    ranks: Tensor
    """int64 [n]: 1 + how many tokens are likelier."""
    top_token_ids: Tensor
    """int64 [n, k], the likeliest first, equals by id."""
    top_logprobs: Tensor
    """float32 [n, k]."""

    def to_host(self) -> Scores:
        """The same in main memory, once the device's work up to here is done. Does not wait for it."""
        return Scores(
            *map(ops.to_host, (self.token_ids, self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs))
        )

    def unpack(self, num_top: Sequence[int]) -> list[TokenLogprobs | None]:
        """Row by row, with as many of the likeliest as each is to have (k at most); None where logits were not usable.

        Waits for the device unless it is the host.
        """
        rows = zip(self.top_token_ids.tolist(), self.top_logprobs.tolist(), num_top, strict=True)
        tops = [tuple(zip(ids[:count], logprobs[:count], strict=True)) for ids, logprobs, count in rows]
        own = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), tops, strict=True)
        return [None if each[1] != each[1] else TokenLogprobs(*each) for each in own]


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Scores:
    """Logits [n, vocabulary] of any floating type, token ids int64 [n] -> their scores, k = `num_top`."""
    parts = [
        _score(logits[i : i + _ROWS_AT_ONCE], token_ids[i : i + _ROWS_AT_ONCE], min(num_top, logits.shape[-1]))
        for i in range(0, len(logits), _ROWS_AT_ONCE)
    ]
    return Scores(token_ids, *map(torch.cat, zip(*parts, strict=True)))


def _score(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = torch.log_softmax(logits.to(torch.float32), dim=-1)
    own = logprobs.gather(1, token_ids[:, None])
    likelier = torch.gt(logprobs, own, out=torch.empty_like(logprobs))  # a float each: bools take three times as long
    ranks = 1 + likelier.sum(-1).to(torch.int64)
    top, top_ids = ops.largest(ops.pad_to_blocks(logprobs), num_top)
    return own[:, 0].clamp(min=LEAST), ranks, top_ids, top.clamp(min=LEAST)
