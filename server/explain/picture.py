"""The explanation as a picture for a talk: who computes what in which slot, both ways, and the masks of two steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from server.explain.draw import count
from server.explain.jobs import Job
from server.explain.mask import Mask, fitting_keys_per_column, make_mask
from server.explain.run import Comparison
from server.explain.timeline import Phase, Segment, Step, Timeline, padded_size, pick_steps, step_story

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, DPI = 16.0, 9.0, 200  # inches: a slide
MARGIN = 0.65
COLORS = {Phase.PREFILL: "#d55e00", Phase.DECODE: "#0072b2", Phase.IDLE: "#eeeeee"}
"""Vermillion and blue of Okabe and Ito: told apart by everybody, and in grey."""
CACHED_COLORS = {Phase.PREFILL: "#f3bf9b", Phase.DECODE: "#97c5e2"}
BLOCKED, INK, FAINT, HATCH = "#f2f2f2", "#1c1c1c", "#666666", "#bdbdbd"
MAX_CACHED_COLUMNS = 64
MASK_HEIGHT, MASK_GAP, MASK_CELL = 1.75, 0.9, 0.25  # at most, at least, at most
MASK_CAPTION = (
    "A row for each token of the step, a column for each key; colored where the token may attend, pale where the key "
    "comes from an earlier step."
)

HEAD: dict[str, Any] = {"fontsize": 16, "weight": "bold", "color": INK}
NOTE: dict[str, Any] = {"fontsize": 13, "color": FAINT}
SMALL: dict[str, Any] = {"fontsize": 11, "color": FAINT}


def check_can_save(path: Path) -> None:
    """Raise ConfigError, with what would help, when no picture can be drawn into `path`. To ask before a long run."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install matplotlib, or chairlift with its extra: pip install '.[explain]'"
        raise ConfigError("--save draws with matplotlib, which is not installed", hint=hint) from error
    endings = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in endings:
        raise ConfigError(f"{path}: no picture can be saved with this ending", hint=f"use one of {', '.join(endings)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}")


def save_picture(comparison: Comparison, path: Path) -> None:
    """Draw the comparison into `path`, in the format of its ending. Raises ConfigError when it cannot be written."""
    try:
        draw(comparison).savefig(path, dpi=DPI, facecolor="white")
    except OSError as error:
        raise ConfigError(f"the picture cannot be saved: {error}") from error


def draw(comparison: Comparison) -> Figure:
    """The whole picture, a 16:9 slide."""
    from matplotlib.figure import Figure  # not pyplot, which keeps state and looks for a display

    figure = Figure(figsize=(WIDTH, HEIGHT))
    static, continuous = comparison.static_timeline, comparison.continuous_timeline
    _draw_title(figure, comparison)
    num_steps = max(len(static.steps), len(continuous.steps))
    upper = _add_axes(figure, MARGIN, 1.72, WIDTH - 2 * MARGIN, 1.12)
    _draw_timeline(upper, static, comparison.jobs, num_steps)
    _draw_barriers(upper, list(accumulate(wave.num_steps for wave in comparison.static.waves)))
    _draw_head(figure, MARGIN, 1.57, "Static batching", _summary(static, comparison.static.elapsed_s))
    lower = _add_axes(figure, MARGIN, 3.62, WIDTH - 2 * MARGIN, 1.12)
    _draw_timeline(lower, continuous, comparison.jobs, num_steps)
    lower.set_xlabel("step (one forward pass of the model)", **SMALL)
    _draw_head(figure, MARGIN, 3.47, "Continuous batching", _summary(continuous, comparison.continuous.elapsed_s))
    if len(continuous.steps) < len(static.steps):
        _draw_saving(lower, len(continuous.steps), len(static.steps))
    _draw_masks(figure, continuous, comparison.jobs)
    _write(figure, MARGIN, HEIGHT - 0.28, MASK_CAPTION, **SMALL)
    return figure


def _summary(timeline: Timeline, elapsed_s: float) -> str:
    wasted = 1 - timeline.num_useful / timeline.num_computed
    waste = f"{wasted:.0%} of the computed tokens thrown away" if wasted else "every computed token is of use"
    return f"{count(len(timeline.steps), 'step')}, {elapsed_s:.1f} s, {waste}"


def _add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place in inches, from the left and from the top."""
    return figure.add_axes((left / WIDTH, 1 - (top + height) / HEIGHT, width / WIDTH, height / HEIGHT))


def _write(figure: Figure, left: float, baseline: float, text: str, **style: Any) -> float:
    """Write a line at a place in inches, from the left and from the top; returns where it ends."""
    line = figure.text(left / WIDTH, 1 - baseline / HEIGHT, text, va="baseline", **style)
    return float(line.get_window_extent().x1) / figure.dpi


def _draw_head(figure: Figure, left: float, baseline: float, title: str, rest: str) -> None:
    end = _write(figure, left, baseline, title, **HEAD)
    _write(figure, end + 0.15, baseline, rest, **NOTE)


def _draw_title(figure: Figure, comparison: Comparison) -> None:
    from matplotlib.patches import Patch

    static, continuous = comparison.static_timeline, comparison.continuous_timeline
    same = "the same tokens" if comparison.outputs_agree else "NOT the same tokens"
    _write(figure, MARGIN, 0.68, "Why continuous batching", fontsize=27, weight="bold", color=INK)
    subtitle = (
        f"{count(len(comparison.jobs), 'request')}, {count(continuous.num_slots, 'slot')}, {comparison.model_name}: "
        f"{same} in {count(len(continuous.steps), 'step')} instead of {len(static.steps)}"
    )
    _write(figure, MARGIN, 1.03, subtitle, fontsize=14, color=FAINT)
    figure.legend(
        handles=[
            Patch(color=COLORS[Phase.PREFILL], label="prefill"),
            Patch(color=COLORS[Phase.DECODE], label="decode"),
            Patch(facecolor=COLORS[Phase.IDLE], edgecolor=HATCH, hatch="////", linewidth=0, label="done, yet computed"),
        ],
        loc="upper right",
        bbox_to_anchor=(1 - MARGIN / WIDTH, 1 - 0.42 / HEIGHT),
        borderaxespad=0,
        borderpad=0,
        ncols=3,
        frameon=False,
        fontsize=13,
        labelcolor=INK,
        handlelength=1.2,
        handleheight=1.0,
        columnspacing=1.4,
    )


def _draw_timeline(ax: Axes, timeline: Timeline, jobs: Sequence[Job], num_steps: int) -> None:
    """Bars: slots down, steps across."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(0, num_steps)
    ax.set_ylim(timeline.num_slots - 0.5, -0.5)
    ax.set_yticks(range(timeline.num_slots), [f"{slot + 1}" for slot in range(timeline.num_slots)])
    ax.set_ylabel("slot", labelpad=3, **SMALL)
    ax.tick_params(length=0, labelsize=min(11, 40 / timeline.num_slots), labelcolor=FAINT)
    ax.tick_params(axis="x", labelsize=11)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.spines[:].set_visible(False)
    for segment in timeline.segments():
        idle = segment.phase is Phase.IDLE
        inches = (segment.end - segment.first) / num_steps * (WIDTH - 2 * MARGIN)
        ax.barh(
            segment.slot,
            segment.end - segment.first,
            left=segment.first,
            height=0.8,
            color=COLORS[segment.phase],
            hatch="////" if idle else None,
            edgecolor=HATCH if idle else COLORS[segment.phase],
            linewidth=0,
        )
        _draw_label(ax, segment, jobs[segment.request], inches, timeline.num_slots)
    gap = num_steps / 500  # between one request and the next
    for admission in timeline.admissions():
        if admission.previous is not None:
            ax.barh(admission.slot, gap, left=admission.step - gap, height=0.82, color="white")


def _draw_label(ax: Axes, segment: Segment, job: Job, inches: float, num_slots: int) -> None:
    """Whose bar it is, as far as its `inches` have room for it."""
    fontsize = min(13 if inches > 0.2 else 10, 40 / num_slots)
    style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": fontsize}
    middle = (segment.first + segment.end) / 2
    if segment.phase is Phase.DECODE and inches > 0.13:
        text = f"{job.label}   {count(job.num_output_tokens, 'token')}" if inches > 1.5 else job.label
        ax.text(middle, segment.slot, text, color="white", weight="bold", **style)
    elif segment.phase is Phase.IDLE and inches > 2.2:
        box = {"boxstyle": "square,pad=0.25", "facecolor": COLORS[Phase.IDLE], "edgecolor": "none"}
        ax.text(middle, segment.slot, f"{job.label} is done, its slot is not free", color=FAINT, bbox=box, **style)


def _draw_barriers(ax: Axes, wave_ends: Sequence[int]) -> None:
    """Where a wave ends and the next one may begin."""
    for end in wave_ends[:-1]:
        ax.plot([end, end], [-0.85, ax.get_ylim()[0]], color=INK, linewidth=1.5, clip_on=False)
        if end > 0.6 * ax.get_xlim()[1]:  # right of the heading
            ax.text(end, -0.9, "barrier", ha="center", va="bottom", fontsize=12, color=INK)


def _draw_saving(ax: Axes, end: int, static_end: int) -> None:
    """What is left of the static run when the continuous one is over."""
    height = sum(ax.get_ylim()) / 2
    arrow = {"arrowstyle": "<->", "color": FAINT, "linewidth": 1.2, "shrinkA": 3, "shrinkB": 0}
    ax.annotate("", (end, height), (static_end, height), arrowprops=arrow)
    ax.text((end + static_end) / 2, height - 0.12, f"{static_end - end} steps fewer", ha="center", **NOTE)


def _draw_masks(figure: Figure, timeline: Timeline, jobs: Sequence[Job]) -> None:
    """The masks of the steps that show most, side by side, with cells of one size."""
    indices = pick_steps(timeline)
    steps = [timeline.steps[index] for index in indices]
    masks = [make_mask(step, fitting_keys_per_column(step, MAX_CACHED_COLUMNS)) for step in steps]
    sizes = [(len(mask.cached_requests) + 1 + len(mask.requests), len(mask.requests)) for mask in masks]
    free, num_columns = WIDTH - 2 * MARGIN, sum(width for width, _ in sizes)
    cell = min((free - MASK_GAP) / num_columns, MASK_HEIGHT / max(height for _, height in sizes), MASK_CELL)
    left, top = MARGIN, 6.12
    for index, step, mask, (width, height) in zip(indices, steps, masks, sizes, strict=True):
        _draw_head(figure, left, top - 0.42, f"Step {index + 1}", step_story(timeline, index, jobs))
        ax = _add_axes(figure, left, top, width * cell, height * cell)
        _draw_mask(ax, mask, jobs, cell)
        _write(figure, left, top + height * cell + 0.52, _packing(step), **SMALL)
        # the second one ends at the right margin, but a small one does not stand far away
        left = min(WIDTH - MARGIN - sizes[-1][0] * cell, max(WIDTH / 2, left + width * cell + MASK_GAP))


def _packing(step: Step) -> str:
    num_tokens, size = sum(share.num_tokens for share in step), padded_size(step)
    if size == num_tokens:
        return f"{count(num_tokens, 'token')} in one packed row"
    return f"{count(num_tokens, 'token')} in one packed row; padded to a rectangle it would be {size}"


def _draw_mask(ax: Axes, mask: Mask, jobs: Sequence[Job], cell: float) -> None:
    """Colored cells may attend. `cell` is their size in inches."""
    import numpy as np
    from matplotlib.colors import to_rgb

    num_rows, num_cached = mask.cached.shape
    image = np.ones((num_rows, num_cached + 1 + num_rows, 3))  # the white column between holds the bar
    for row, phase in enumerate(mask.phases):
        image[row, :num_cached] = np.where(mask.cached[row, :, None], to_rgb(CACHED_COLORS[phase]), to_rgb(BLOCKED))
        image[row, num_cached + 1 :] = np.where(mask.packed[row, :, None], to_rgb(COLORS[phase]), to_rgb(BLOCKED))
    num_columns = image.shape[1]
    ax.imshow(image, extent=(0, num_columns, num_rows, 0), aspect="auto", interpolation="nearest")
    ax.hlines(range(1, num_rows), 0, num_columns, color="white", linewidth=9 * cell)
    ax.vlines(range(1, num_columns), 0, num_rows, color="white", linewidth=9 * cell)
    ax.plot([num_cached + 0.5] * 2, [-0.6, num_rows + 0.6], color=INK, linewidth=2, clip_on=False)
    ax.set(xlim=(0, num_columns), ylim=(num_rows, 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    _draw_letters(ax, mask, jobs, cell)
    scale = f" ({mask.keys_per_column} a column)" if mask.keys_per_column > 1 else ""
    below: dict[str, Any] = {"va": "top", "ha": "center", **SMALL}
    if num_cached:
        ax.text(num_cached / 2, num_rows + 0.6, f"keys in the KV cache{scale}", **below)
    ax.text(num_cached + 1 + num_rows / 2, num_rows + 0.6, "keys of this step", **below)


def _draw_letters(ax: Axes, mask: Mask, jobs: Sequence[Job], cell: float) -> None:
    """The letters of the requests: above their keys, and left of their rows."""
    # a letter beside a single cell must not run into its neighbour's
    style: dict[str, Any] = {"fontsize": min(11, 85 * cell), "weight": "bold", "color": INK}
    for requests, offset in ((mask.cached_requests, 0), (mask.requests, len(mask.cached_requests) + 1)):
        for request, first, end in _runs(requests):
            ax.text(offset + (first + end) / 2, -0.3, jobs[request].label, ha="center", va="bottom", **style)
    for request, first, end in _runs(mask.requests):
        ax.text(-0.5, (first + end) / 2, jobs[request].label, ha="right", va="center_baseline", **style)


def _runs(requests: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of the same request, as (request, first, end)."""
    runs, first = [], 0
    for request, group in groupby(requests):
        end = first + len(list(group))
        runs.append((request, first, end))
        first = end
    return runs
