"""Timelines, steps and masks drawn with letters. Each request has a letter and a color."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from server.explain.jobs import Job
from server.explain.mask import Mask
from server.explain.timeline import Admission, Phase, Share, Step, Timeline

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""One a request, in turn: those of Okabe and Ito that show on dark and on light, told apart by everybody."""
MASK_MARGIN = 12  # columns left of the mask's first key


def color(request: int) -> str:
    """A request's style."""
    return COLORS[request % len(COLORS)]


def name(request: int, jobs: Sequence[Job]) -> Text:
    """A request's letter."""
    return Text(jobs[request].label, "bold " + color(request))


def count(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def draw_timeline(timeline: Timeline, jobs: Sequence[Job], steps_per_column: int) -> Group:
    """A line for each slot: `aAAA...` is A's prefill, its decodes, and what is computed for A after its end."""
    cells: dict[tuple[int, int], Share] = {}
    for index, step in enumerate(timeline.steps):
        for share in step:
            place = (share.slot, index // steps_per_column)
            shown = cells.get(place)
            if shown is None or (share.phase is Phase.PREFILL and shown.phase is not Phase.PREFILL):
                cells[place] = share  # a prefill takes few steps, and is where a request begins: let it be seen
    columns = range(-(-len(timeline.steps) // steps_per_column))
    lines = []
    for slot in range(timeline.num_slots):
        line = Text(f"slot {slot + 1:<2} ")
        for column in columns:
            line.append_text(_cell(cells.get((slot, column)), jobs))
        line.rstrip()
        lines.append(line)
    return Group(*lines)


def _cell(share: Share | None, jobs: Sequence[Job]) -> Text:
    if share is None:
        return Text(" ")
    if share.phase is Phase.IDLE:
        return Text(".", "dim")
    if share.phase is Phase.PREFILL:
        return Text(jobs[share.request].label.lower(), color(share.request) + " reverse")
    return Text(jobs[share.request].label, color(share.request))


def draw_admission(admission: Admission, jobs: Sequence[Job]) -> Text:
    """Who gets on where, and in whose place."""
    line = Text(f"step {admission.step + 1:4}  ")
    line.append_text(name(admission.request, jobs)).append(f" takes slot {admission.slot + 1}")
    if admission.previous is not None and admission.left_at is not None:
        line.append(", which ").append_text(name(admission.previous, jobs))
        line.append(f" left at step {admission.left_at + 1}")
    if admission.num_cached_tokens:
        total = jobs[admission.request].num_prompt_tokens
        line.append(f"; prefix cache: {admission.num_cached_tokens} of {total} prompt tokens", "italic")
    return line


def draw_packed_row(step: Step, jobs: Sequence[Job]) -> Group:
    """The step's tokens in a row, and under it each request's share in words."""
    row = Text("|")
    for share in step:
        row.append(jobs[share.request].label * share.num_tokens, color(share.request)).append("|")
    return Group(row, *(_draw_share(share, jobs) for share in step))


def _draw_share(share: Share, jobs: Sequence[Job]) -> Text:
    line = name(share.request, jobs)
    total = jobs[share.request].num_prompt_tokens
    if share.phase is Phase.DECODE:
        made = share.start - total + 1
        line.append(f" {f'decode({share.num_tokens})':12} ")
        return line.append(f"output token {made} goes in, token {made + 1} comes out; {share.start} cached keys", "dim")
    line.append(f" {f'PREFILL({share.num_tokens})':12} ", "bold")
    span = f"{share.start + 1}-{share.end}" if share.num_tokens > 1 else f"{share.end}"
    rest = f"{total - share.end} left for later steps" if share.end < total else "its first output token comes out"
    cached = f"; {share.start} cached keys" if share.start else ""
    return line.append(f"prompt tokens {span} of {total}, {rest}{cached}", "dim")


def draw_padded(step: Step, jobs: Sequence[Job]) -> Group:
    """The same step as a batch padded to its longest row: `-` is padding."""
    longest = max(share.num_tokens for share in step)
    lines = []
    for share in step:
        line = Text("|").append("-" * (longest - share.num_tokens), "dim")
        line.append(jobs[share.request].label * share.num_tokens, color(share.request)).append("|")
        lines.append(line)
    return Group(*lines)


def draw_mask(mask: Mask, jobs: Sequence[Job]) -> Group:
    """`#` may attend, `.` blocked, cached keys left of the bar; letters say whose token and whose key it is."""

    def letters(requests: Sequence[int]) -> Text:
        return Text.assemble(*((jobs[request].label, color(request)) for request in requests))

    head = Text(f"{'position':>{MASK_MARGIN - 1}} ", "dim").append_text(letters(mask.cached_requests))
    lines = [head.append("|", "default").append_text(letters(mask.requests))]
    for i, (request, position) in enumerate(zip(mask.requests, mask.positions, strict=True)):
        line = name(request, jobs).append(f"{position:>{MASK_MARGIN - 2}} ", "dim")
        line.append_text(_marks(mask.cached[i].tolist(), request)).append("|")
        lines.append(line.append_text(_marks(mask.packed[i].tolist(), request)))
    return Group(*lines)


def _marks(allowed: Sequence[bool], request: int) -> Text:
    return Text.assemble(*(("#", color(request)) if allow else (".", "dim") for allow in allowed))
