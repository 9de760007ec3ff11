"""What requests change in their rows' logits before a token is chosen: masks, bias, penalties.

Every edit but a grammar's names the tokens it touches, hundreds of a row's tens of thousands, so they are applied as
lists of *cells* (row * vocabulary + token), all rows at once, and nothing of the size of the vocabulary is made. Tokens
are counted anew in each step, from the row's own context: nothing is kept between steps, so nothing can be left over
from one, and a preempted request needs no state put back.

Greedy rows have edits like any other: all of them can change which token is the most likely one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.params import MAX_LOGIT_BIAS, SamplingParams
from engine.plan import PlanRow

_Entries = list[tuple[int, PlanRow, SamplingParams]]
"""Rows that have a certain edit: place among the logits, row, its parameters."""

_LARGEST = 1e30
"""Penalties make no logit larger: what is still a number when it is divided by the lowest temperature."""

Edit = Callable[[Tensor, _Entries], None]
"""Changes, in place, float32 logits [n, vocabulary] (contiguous) of the rows that want it."""


def edits_of(rows: Sequence[PlanRow]) -> list[tuple[Edit, _Entries]]:
    """What is to be done with the logits of these rows, in order; nothing for most."""
    entries = [(i, row, row.sampling) for i, row in enumerate(rows) if row.sampling is not None]
    wanted = [(edit, [entry for entry in entries if wants(entry[1], entry[2])]) for wants, edit in _ORDER]
    return [(edit, chosen) for edit, chosen in wanted if chosen]


def _mask(logits: Tensor, chosen: _Entries) -> None:
    """Ban what the rows' grammars do not allow; see `PlanRow.mask`."""
    masks = bytearray().join([row.mask() for _, row, _ in chosen if row.mask is not None])
    packed = torch.frombuffer(masks, dtype=torch.uint8).view(len(chosen), -1)
    if logits.is_cuda:  # from memory that is not pinned the copy would wait for the forward pass
        packed = packed.pin_memory().to(logits.device, non_blocking=True)
    limits = F.embedding(packed.int(), _limits(logits.device)).flatten(1)[:, : logits.shape[-1]]
    for (i, *_), limit in zip(chosen, limits, strict=True):
        torch.minimum(logits[i], limit, out=logits[i])  # 1.3 ms for 32 rows of 49k; masked_fill takes 7


@cache
def _limits(device: torch.device) -> Tensor:
    """float32 [256, 8]: for each byte of a mask the largest logits that its eight tokens may have."""
    rows = [[math.inf if byte >> bit & 1 else -math.inf for bit in range(8)] for byte in range(256)]
    return torch.tensor(rows, device=device)


def _allow(logits: Tensor, chosen: _Entries) -> None:
    """Leave the `allowed_token_ids` as they are and ban all others."""
    for i, _, params in chosen:
        token_ids = _to(_ids(params.allowed_token_ids or ()), logits)  # torch.tensor takes 16 ms for 50,000; this 1
        allowed = logits[i, token_ids]
        logits[i] = float("-inf")
        logits[i, token_ids] = allowed


def _ban(logits: Tensor, chosen: _Entries) -> None:
    cells = _cells(((i, row.banned_token_ids) for i, row, _ in chosen), logits.shape[-1])
    logits.view(-1)[_to(cells, logits)] = float("-inf")


def _bias(logits: Tensor, chosen: _Entries) -> None:
    cells = _cells(((i, params.logit_bias) for i, _, params in chosen), logits.shape[-1])
    bias = np.array([value for *_, params in chosen for value in params.logit_bias.values()], dtype=np.float32)
    bias[bias <= -MAX_LOGIT_BIAS] = -np.inf
    where = _to(cells, logits)
    logits.view(-1)[where] += _to(bias, logits)


def _penalise_repetition(logits: Tensor, chosen: _Entries) -> None:
    """Divide the positive logits of tokens in prompt and output by the penalty, multiply the others by it.

    N. Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable Generation", 2019, with the
    multiplication that Hugging Face added for negative logits.
    """
    contexts = [row.context[: row.end] for _, row, _ in chosen]
    cells = _cells(zip((i for i, *_ in chosen), contexts, strict=True), logits.shape[-1])
    penalties = np.array([params.repetition_penalty for *_, params in chosen], dtype=np.float32)
    where, penalty = _to(cells, logits), _to(penalties.repeat([len(each) for each in contexts]), logits)
    before = logits.view(-1)[where]
    after = torch.where(before > 0, before / penalty, before * penalty).clamp(-_LARGEST, _LARGEST)
    # A token that comes several times is written as often, with the same number.
    logits.view(-1)[where] = torch.where(before.isfinite(), after, before)


def _penalise_output(logits: Tensor, chosen: _Entries) -> None:
    """logit - frequency_penalty * (times in the output) - presence_penalty * (is in the output)."""
    vocab_size = logits.shape[-1]
    outputs = ((i, row.context[row.num_prompt_tokens : row.end]) for i, row, _ in chosen)
    cells, counts = np.unique(_cells(outputs, vocab_size), return_counts=True)
    penalties = np.zeros((2, len(logits)))
    for i, _, params in chosen:
        penalties[:, i] = params.frequency_penalty, params.presence_penalty
    frequency, presence = penalties[:, cells // vocab_size]
    logits.view(-1)[_to(cells, logits)] -= _to((frequency * counts + presence).astype(np.float32), logits)


_ORDER: Sequence[tuple[Callable[[PlanRow, SamplingParams], bool], Edit]] = (
    (lambda row, params: row.mask is not None, _mask),
    (lambda row, params: params.allowed_token_ids is not None, _allow),
    (lambda row, params: bool(row.banned_token_ids), _ban),
    (lambda row, params: bool(params.logit_bias), _bias),
    (lambda row, params: params.repetition_penalty != 1, _penalise_repetition),
    (lambda row, params: params.frequency_penalty != 0 or params.presence_penalty != 0, _penalise_output),
)
"""Who wants an edit, and the edit, in the order in which they are applied."""


def _cells(parts: Iterable[tuple[int, Iterable[int]]], vocab_size: int) -> NDArray[np.int64]:
    """Tokens of rows -> their places in the logits seen as one row."""
    return np.concatenate([_ids(token_ids) + i * vocab_size for i, token_ids in parts])


def _ids(token_ids: Iterable[int]) -> NDArray[np.int64]:
    if isinstance(token_ids, Sequence):
        return np.asarray(token_ids, dtype=np.int64)
    return np.fromiter(token_ids, dtype=np.int64)


def _to(values: NDArray[np.int64] | NDArray[np.float32], logits: Tensor) -> Tensor:
    return torch.from_numpy(values).to(logits.device, non_blocking=True)
