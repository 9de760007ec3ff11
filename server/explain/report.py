"""The explanation as text, for a terminal of 100 columns; narrower ones will do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from server.explain.draw import (
    MASK_MARGIN,
    count,
    draw_admission,
    draw_mask,
    draw_packed_row,
    draw_padded,
    draw_timeline,
    name,
)
from server.explain.jobs import Job
from server.explain.mask import count_attended, fitting_keys_per_column, make_mask
from server.explain.run import Comparison
from server.explain.timeline import Timeline, padded_size, pick_steps, step_story

MAX_WIDTH = 100
INDENT = 2


def print_report(comparison: Comparison, console: Console) -> None:
    """Print the whole explanation."""
    width = min(console.width, MAX_WIDTH)
    for block in _report(comparison, width):
        console.print(block, width=width)


def _report(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    jobs, info = comparison.jobs, comparison.info
    static, continuous = comparison.static_timeline, comparison.continuous_timeline
    num_columns = width - INDENT - len("slot 10 ")
    steps_per_column = -(-max(len(static.steps), len(continuous.steps)) // num_columns)

    sizes = f"{count(len(jobs), 'prompt')}, {count(continuous.num_slots, 'slot')}"
    yield Text(f"{sizes}; {comparison.model_name} in {info.dtype} on {info.device}")
    yield _body(_job_table(jobs, width - INDENT))

    yield from _title("Static batching", _length(static, comparison.static.elapsed_s), width)
    yield Text(
        "A wave of prompts, padded to one length, runs until its longest output is done. A row that is done before "
        "that is computed all the same, and whoever waits outside goes on waiting."
    )
    yield _body(draw_timeline(static, jobs, steps_per_column))
    yield _body(_legend(jobs, steps_per_column))

    yield from _title("Continuous batching", _length(continuous, comparison.continuous.elapsed_s), width)
    yield Text(
        "The batch is made anew for every step: whoever is done gets off, whoever waits gets on, and no slot is kept "
        "for a request that has ended."
    )
    yield _body(draw_timeline(continuous, jobs, steps_per_column))
    yield _body(Group(*(draw_admission(admission, jobs) for admission in continuous.admissions())))

    for index in pick_steps(continuous):
        yield from _explain_step(continuous, index, jobs, width)

    yield from _title("What it costs", "tokens that went through the model, for the same outputs", width)
    yield _body(_cost_table(comparison))
    yield from _title("Who waits how long", "seconds until an answer is complete, and whether it is the same", width)
    yield _body(_answer_table(comparison, width - INDENT))
    yield _verdict(comparison)


def _explain_step(timeline: Timeline, index: int, jobs: Sequence[Job], width: int) -> Iterator[RenderableType]:
    step = timeline.steps[index]
    num_tokens = sum(share.num_tokens for share in step)
    yield from _title(f"Step {index + 1}", step_story(timeline, index, jobs), width)
    yield Text(f"{count(num_tokens, 'token')} in one packed row; nothing is padded.")
    yield _body(draw_packed_row(step, jobs))
    size, longest = padded_size(step), max(share.num_tokens for share in step)
    padding = size - num_tokens
    if padding:
        yield Text(
            f"\nAs a batch padded to its longest row it would be {len(step)} x {longest} = {size} tokens, "
            f"{padding} of them ({padding / size:.0%}) padding:"
        )
        yield _body(draw_padded(step, jobs))
    attended, pairs = count_attended(step)
    mask = make_mask(step, fitting_keys_per_column(step, width - INDENT - MASK_MARGIN - 1 - num_tokens))
    scale = f", {mask.keys_per_column} to a column" if mask.keys_per_column > 1 else ""
    yield Text(
        "\nThe mask: a row for each token, a column for each key. # may attend, . blocked. Left of the bar are keys "
        f"of earlier steps, from the KV cache{scale}; right of it those of this step."
    )
    yield _body(draw_mask(mask, jobs))
    yield Text(
        f"\n{attended} of {pairs} pairs ({attended / pairs:.0%}) may attend. The engine never builds this mask: a "
        "request's tokens read that request's own blocks, and no others."
    )


def _job_table(jobs: Sequence[Job], width: int) -> Table:
    """Each request with its sizes and its prompt, as far as there is room."""
    table = _table("request", "prompt", "output", left=("request",))
    table.add_column("text", no_wrap=True)
    for index, job in enumerate(jobs):
        sizes = count(job.num_prompt_tokens, "token"), count(job.num_output_tokens, "token")
        table.add_row(name(index, jobs), *sizes, _excerpt(job.prompt, width - 38))
    return table


def _cost_table(comparison: Comparison) -> Table:
    static, continuous = comparison.static_timeline, comparison.continuous_timeline
    cached = sum(admission.num_cached_tokens for admission in continuous.admissions())
    padded, packed = continuous.num_padded_to_rectangles, continuous.num_computed
    elapsed = comparison.static.elapsed_s, comparison.continuous.elapsed_s
    table = _table("", "static", "continuous", left=("",))
    table.add_column("")

    def add(what: str, static_value: str, continuous_value: str, note: str = "", style: str = "") -> None:
        table.add_row(what, static_value, continuous_value, Text(note, "dim"), style=style)

    add("tokens computed", f"{static.num_computed:,}", f"{continuous.num_computed:,}")
    hits = f"{cached} were in the prefix cache" if cached else ""
    add("  of use", f"{static.num_useful:,}", f"{continuous.num_useful:,}", hits)
    add("  padding of prompts", f"{static.num_prompt_padding:,}", f"{continuous.num_prompt_padding:,}")
    add("  rows that were done", f"{static.num_idle:,}", f"{continuous.num_idle:,}")
    add("wasted", _wasted(static), _wasted(continuous), style="bold")
    add("  with padded steps", "", f"{(padded - packed) / padded:.1%}", f"{padded:,} tokens: what packing saves")
    add("steps", f"{len(static.steps):,}", f"{len(continuous.steps):,}")
    faster = f"{elapsed[0] / elapsed[1]:.1f} times as fast" if elapsed[1] < elapsed[0] else ""
    add("time", f"{elapsed[0]:.1f} s", f"{elapsed[1]:.1f} s", faster)
    return table


def _length(timeline: Timeline, elapsed_s: float) -> str:
    return f"{count(len(timeline.steps), 'step')}, {elapsed_s:.1f} s"


def _wasted(timeline: Timeline) -> str:
    return f"{1 - timeline.num_useful / timeline.num_computed:.1%}"


def _answer_table(comparison: Comparison, width: int) -> Table:
    """When each answer was complete, and whether it is the same both ways."""
    jobs = comparison.jobs
    table = _table("request", "output", "static", "continuous", left=("request",))
    table.add_column("both ways")
    table.add_column("text", no_wrap=True)
    static_s, continuous_s = comparison.static_finished_s, comparison.continuous.finished_s
    for index, job in enumerate(jobs):
        difference = comparison.first_difference(index)
        if difference is None:
            check = Text("same tokens", "green")
        else:
            check = Text(f"DIFFER from token {difference + 1}", "bold red")
        times = f"{static_s[index]:.1f} s", f"{continuous_s[index]:.1f} s"
        text = _excerpt(comparison.texts[index], width - 66)
        table.add_row(name(index, jobs), count(job.num_output_tokens, "token"), *times, check, text)
    means = [f"{sum(times) / len(jobs):.1f} s" for times in (static_s, continuous_s)]
    table.add_row("mean", "", *means, style="bold")
    return table


def _verdict(comparison: Comparison) -> Text:
    """The proof, in a line."""
    num_tokens = sum(job.num_output_tokens for job in comparison.jobs)
    if comparison.outputs_agree:
        return Text(f"\nProved: both ways give the same {count(num_tokens, 'token')}.", "bold green")
    wrong = sum(comparison.first_difference(index) is not None for index in range(len(comparison.jobs)))
    return Text(f"\nNOT proved: {wrong} of {len(comparison.jobs)} outputs differ.", "bold red")


def _legend(jobs: Sequence[Job], steps_per_column: int) -> Text:
    label = jobs[0].label
    scale = "a column is a step" if steps_per_column == 1 else f"a column is {steps_per_column} steps"
    return Text(f"{label.lower()} prefill   {label} decode   . computed for a request that is done   ({scale})", "dim")


def _title(title: str, rest: str, width: int) -> Iterator[Text]:
    yield Text("\n" + "-" * width, "dim")
    yield Text.assemble((title, "bold"), f": {rest}")


def _body(body: RenderableType) -> Padding:
    return Padding(body, (1, 0, 0, INDENT), expand=False)


def _table(*columns: str, left: Sequence[str]) -> Table:
    """A table of numbers: columns are right-aligned but for those in `left`."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def _excerpt(text: str, width: int) -> Text:
    """The beginning of a text, in one line."""
    excerpt = Text(" ".join(text.split()), "dim")
    excerpt.truncate(max(width, 8), overflow="ellipsis")
    return excerpt
