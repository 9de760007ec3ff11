"""The sampler: logits to tokens, in one documented order.

     0. float32                     whatever the model computes in
     1. masks                       the grammar's; allowed_token_ids; no end-of-text or stop token before
                                    min_tokens                                                           (`edits`)
     2. logit_bias                  added; -100 bans the token                                           (`edits`)
     3. repetition_penalty          divides or multiplies the logits of tokens of prompt and output      (`edits`)
     4. frequency_penalty,          taken off the logits of tokens of the output                         (`edits`)
        presence_penalty
     5. greedy rows                 temperature 0 (or below 1e-5) or top_k 1: the largest logit, and nothing else
     6. temperature                 softmax(logits / temperature)
     7. min_p                       drop what is less likely than min_p times the most likely token
     8. top_k                       keep the k most likely
     9. top_p                       keep the smallest set of the most likely of what is left, whose share of what is
                                    left is at least p
    10. one number of (0, 1)        chosen by (seed, position) alone; invert the distribution function

The order is vLLM's (its V1 sampler). 7 and 8 could change places; 9 could not, since it counts shares of what 7 and 8
left. Equally likely tokens rank by id, lowest first: top_k keeps exactly k tokens, top_p never more than it needs. The
most likely token passes every filter, so there is always one to choose; that the masks leave one is seen to before a
request is queued (`engine.core.check_fit`). Reported logprobs are of the logits before all of this (`logprobs`).

Rows pay for what they use: only rows with edits are edited, greedy rows go no further than 5, rows with a temperature
alone are not ranked.

A row whose logits are NaN, or nothing but -inf, or +inf anywhere, gets -1 for a token, and its neighbours never notice.
Steps 5 to 10 are done in torch (`ops`), or by the kernels where they have a way of their own: in C that is half of the
time and less, and the same tokens but for rounding. A result is a function of its row's logits, parameters, seed and
position; see `ops` for how exact that is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.kernels import Choices, ChooseTokens
from engine.params import SamplingParams
from engine.plan import PlanRow
from engine.sample import ops
from engine.sample.edits import edits_of
from engine.sample.random import uniform


class Sampler:
    """Chooses one token for each row of logits. Holds no state; see the head of this file for what it does."""

    def __init__(self, choose_tokens: ChooseTokens | None = None) -> None:
        """`choose_tokens`: the kernels' own way to do 5 to 10, if they have one."""
        self._choose_tokens = choose_tokens

    def sample(self, logits: Tensor, rows: Sequence[PlanRow]) -> Tensor:
        """Choose a token for each row: int64 [rows], on the logits' device; -1 where they are not usable.

        `logits` [rows, vocabulary], any floating type, any device, left as they are; `rows` in the same order, each
        with `sampling`. On CUDA nothing is read back, so this does not wait for the device to compute.
        """
        parts = list(self._by_kernel(logits, rows) if self._choose_tokens else _by_ops(logits, rows))
        if len(parts) == 1:  # all rows, in order
            return parts[0][1]
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        for index, part_ids in parts:
            token_ids[torch.tensor(index, device=logits.device)] = part_ids
        return token_ids

    def _by_kernel(self, logits: Tensor, rows: Sequence[PlanRow]) -> Iterator[tuple[list[int], Tensor]]:
        """The kernel reads rows where they lie; only those with edits are copied."""
        assert self._choose_tokens is not None
        logits = logits.to(torch.float32)
        with_edits = {i for _, chosen in edits_of(rows) for i, *_ in chosen}
        edited = sorted(with_edits)
        as_they_are = [i for i in range(len(rows)) if i not in with_edits]
        if as_they_are:
            choices = _choices(as_they_are, [rows[i] for i in as_they_are], logits.shape[-1])
            yield as_they_are, self._choose_tokens(logits, choices)
        if edited:
            edited_rows = [rows[i] for i in edited]
            part = _take(logits, torch.tensor(edited), edited_rows)
            yield edited, self._choose_tokens(part, _choices(range(len(edited)), edited_rows, logits.shape[-1]))


def _choices(where: Sequence[int], rows: Sequence[PlanRow], vocab_size: int) -> Choices:
    all_params = [_params(row) for row in rows]
    settings = array("d", [0.0 if _is_greedy(params) else params.temperature for params in all_params])
    settings.extend([_top_k(params, vocab_size) for params in all_params])
    settings.extend([params.top_p for params in all_params])
    settings.extend([params.min_p for params in all_params])
    seeds, positions = array("Q", [row.seed for row in rows]), array("q", [row.end for row in rows])
    return Choices(array("q", where), settings, seeds, positions)


def _is_greedy(params: SamplingParams) -> bool:
    return params.greedy or params.top_k == 1


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size


def _by_ops(logits: Tensor, rows: Sequence[PlanRow]) -> Iterator[tuple[list[int], Tensor]]:
    """Some rows at a time: where they are, and their tokens."""
    for choose, index in _by_way(rows, vocab_size=logits.shape[-1]):
        chosen_rows = [rows[i] for i in index]
        where = torch.tensor(index, device=logits.device)
        part = _take(logits, where, chosen_rows)
        token_ids, usable = choose(part, chosen_rows, is_own=part is not logits)
        yield index, torch.where(usable, token_ids, -1)


def _by_way(rows: Sequence[PlanRow], *, vocab_size: int) -> list[tuple[_Way, list[int]]]:
    """The ways to choose that these rows take, and the places of those that take each."""
    places: dict[_Way, list[int]] = {}
    for i, row in enumerate(rows):
        params = _params(row)
        if _is_greedy(params):
            way: _Way = _choose_greedy
        elif 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0:
            way = _choose_filtered
        else:
            way = _choose_among_all
        places.setdefault(way, []).append(i)
    return list(places.items())


def _params(row: PlanRow) -> SamplingParams:
    assert row.sampling is not None, "a row that is not to be sampled has no logits"
    return row.sampling


def _take(logits: Tensor, where: Tensor, rows: Sequence[PlanRow]) -> Tensor:
    """These rows of logits in float32, with their edits: a copy, or `logits` themselves if that is all the same."""
    part = (logits if len(where) == len(logits) else logits[where]).to(torch.float32)
    if edits := edits_of(rows):
        part = part.clone(memory_format=torch.contiguous_format) if part is logits else part
        for edit, chosen in edits:
            edit(part, chosen)
    return part


class _Way(Protocol):
    """A way to choose a token."""

    def __call__(self, logits: Tensor, rows: Sequence[PlanRow], *, is_own: bool) -> tuple[Tensor, Tensor]:
        """float32 logits [n, vocabulary] -> token ids [n], usable [n]. `is_own`: the logits may be overwritten."""


def _choose_greedy(logits: Tensor, rows: Sequence[PlanRow], *, is_own: bool) -> tuple[Tensor, Tensor]:
    return ops.greedy(ops.pad_to_blocks(logits))


def _choose_among_all(logits: Tensor, rows: Sequence[PlanRow], *, is_own: bool) -> tuple[Tensor, Tensor]:
    """For rows with a temperature alone."""
    logits = ops.pad_to_blocks(logits)
    settings = _Settings.of(rows, vocab_size=logits.shape[-1], device=logits.device)
    probs = ops.probabilities(logits, settings.temperature, in_place=is_own)
    cdf = ops.block_cdf(probs)
    return ops.draw(probs, cdf, settings.u), cdf[:, -1].isfinite()


def _choose_filtered(logits: Tensor, rows: Sequence[PlanRow], *, is_own: bool) -> tuple[Tensor, Tensor]:
    """For rows with top_k, top_p or min_p."""
    logits = ops.pad_to_blocks(logits)
    settings = _Settings.of(rows, vocab_size=logits.shape[-1], device=logits.device)
    probs = ops.probabilities(logits, settings.temperature, in_place=is_own)
    mass = ops.block_cdf(probs)[:, -1]
    return _draw_filtered(probs, mass, settings.filters, settings.u), mass.isfinite()


def _draw_filtered(probs: Tensor, mass: Tensor, filters: ops.Filters, u: Tensor) -> Tensor:
    """Probabilities [n, v], their sums [n], filters, one number per row [n] -> token ids [n]."""
    vocab_size = probs.shape[-1]
    if probs.device.type != "cpu" or vocab_size < ops.BLOCK * ops.NUM_LEADERS:
        # Asking which rows need more than their leaders would wait for the device; sorting there costs less.
        ranked = ops.ranking(probs)
        num_kept, _ = ops.kept(ranked, mass, vocab_size, filters)
        return ops.draw_ranked(ranked, num_kept, u)

    ranked = ops.leaders(probs)
    num_kept, known = ops.kept(ranked, mass, vocab_size, filters)
    token_ids = ops.draw_ranked(ranked, num_kept, u)
    undecided: list[int] = (~known & mass.isfinite()).nonzero()[:, 0].tolist()
    for one in (slice(i, i + 1) for i in undecided):
        ranked = ops.shortlist(probs[one], mass[one], filters.select(one))
        num_kept, _ = ops.kept(ranked, mass[one], vocab_size, filters.select(one))
        token_ids[one] = ops.draw_ranked(ranked, num_kept, u[one])
    return token_ids


@dataclass(frozen=True, slots=True)
class _Settings:
    """The parameters of n rows as tensors on the logits' device."""

    temperature: Tensor
    """float32 [n]."""
    filters: ops.Filters
    u: Tensor
    """float64 [n], each in (0, 1)."""

    @classmethod
    def of(cls, rows: Sequence[PlanRow], *, vocab_size: int, device: torch.device) -> _Settings:
        params = [_params(row) for row in rows]
        table = np.array(
            [
                [each.temperature for each in params],
                [_top_k(each, vocab_size) for each in params],
                [each.top_p for each in params],
                [each.min_p for each in params],
                uniform([row.seed for row in rows], [row.end for row in rows]),
            ]
        )
        temperature, top_k, top_p, min_p, u = torch.from_numpy(table).to(device, non_blocking=True)
        filters = ops.Filters(top_k.to(torch.int64), top_p, min_p.to(torch.float32))
        return cls(temperature.to(torch.float32), filters, u)
