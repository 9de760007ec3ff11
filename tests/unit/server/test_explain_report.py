"""What `chairlift explain` prints and draws."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from engine.errors import ConfigError
from server.explain.jobs import Job, read_prompts
from server.explain.picture import check_can_save, draw, save_picture
from server.explain.report import print_report
from server.explain.run import Comparison
from tests.factories_explain import make_comparison, make_jobs


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return make_comparison(make_jobs())


def report(comparison: Comparison, width: int = 100, *, color: bool = False) -> str:
    file = io.StringIO()
    print_report(comparison, Console(file=file, width=width, highlight=False, force_terminal=color))
    return file.getvalue()


def lines(comparison: Comparison, width: int = 100) -> list[str]:
    return [line.rstrip() for line in report(comparison, width).splitlines()]


def test_timelines_have_the_barrier_and_the_slots_reused(comparison: Comparison) -> None:
    text = lines(comparison)
    static, continuous = (
        text.index("Static batching: 480 steps, 19.2 s"),
        text.index(next(line for line in text if line.startswith("Continuous batching: 303 steps"))),
    )
    assert text[static + 4] == "  slot 1  a" + "." * 49 + "dDDDD" + "." * 25
    assert text[continuous + 4] == "  slot 1  adDDDDeEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE"
    assert "a column is 6 steps" in text[static + 8]


def test_the_admission_log_says_whose_slot_is_taken(comparison: Comparison) -> None:
    text = lines(comparison)
    first = text.index("  step    1  A takes slot 1")
    assert text[first + 1 : first + 6] == [
        "  step    1  B takes slot 2",
        "  step    2  C takes slot 3",
        "  step    7  D takes slot 1, which A left at step 6",
        "  step   38  E takes slot 1, which D left at step 37",
        "  step   52  F takes slot 2, which B left at step 51; prefix cache: 24 of 32 prompt tokens",
    ]


def test_a_step_is_drawn_packed_padded_and_as_a_mask(comparison: Comparison) -> None:
    text = lines(comparison)
    step = text[text.index("Step 3: C's prompt goes in chunks; decodes ride along") :]
    assert step[3:7] == [
        "  |A|B|CCCCCCCCCCCCCC|",
        "  A decode(1)    output token 2 goes in, token 3 comes out; 6 cached keys",
        "  B decode(1)    output token 1 goes in, token 2 comes out; 12 cached keys",
        "  C PREFILL(14)  prompt tokens 15-28 of 35, 7 left for later steps; 14 cached keys",
    ]
    padded = step.index("  |-------------A|")
    assert step[padded - 2].endswith("3 x 14 = 42 tokens, 26 of them (62%) padding:")
    assert step[padded + 2] == "  |CCCCCCCCCCCCCC|"
    mask = step.index("     position AAAAAABBBBBBBBBBBBCCCCCCCCCCCCCC|ABCCCCCCCCCCCCCC")
    assert step[mask + 1] == "  A         6 ######..........................|#..............."
    assert step[mask + 2] == "  B        12 ......############..............|.#.............."
    assert step[mask + 3] == "  C        14 ..................##############|..#............."
    assert step[mask + 16] == "  C        27 ..................##############|..##############"
    assert step[mask + 18].startswith("321 of 768 pairs (42%)")


def test_waste_is_counted(comparison: Comparison) -> None:
    words = [line.split() for line in lines(comparison)]
    assert ["tokens", "computed", "1,635", "694"] in words
    assert ["padding", "of", "prompts", "88", "0"] in words
    assert ["rows", "that", "were", "done", "829", "0"] in words
    assert ["wasted", "56.1%", "0.0%"] in words


def test_equal_outputs_are_proved(comparison: Comparison) -> None:
    assert comparison.outputs_agree
    text = report(comparison)
    assert text.count("same tokens") == 6
    assert "Proved: both ways give the same 611 tokens." in text


def test_a_difference_is_told(comparison: Comparison) -> None:
    wrong = list(comparison.static.outputs)
    wrong[1] = (*wrong[1][:7], wrong[1][7] + 1, *wrong[1][8:])
    changed = replace(comparison, static=replace(comparison.static, outputs=tuple(wrong)))
    assert not changed.outputs_agree
    assert changed.first_difference(1) == 7
    text = report(changed)
    assert "DIFFER from token 8" in text
    assert "NOT proved: 1 of 6 outputs differ." in text


def test_an_output_cut_short_differs_where_it_ends(comparison: Comparison) -> None:
    short = (comparison.static.outputs[0][:4], *comparison.static.outputs[1:])
    assert replace(comparison, static=replace(comparison.static, outputs=short)).first_difference(0) == 4


@pytest.mark.parametrize("width", [60, 80, 100, 250])
def test_no_line_is_wider_than_the_terminal(comparison: Comparison, width: int) -> None:
    widest = max(len(line) for line in report(comparison, width).splitlines())
    assert widest <= min(width, 100)


def test_masks_are_not_broken_in_narrow_terminals(comparison: Comparison) -> None:
    masks = [line for line in lines(comparison, 60) if line.startswith(("  C        14 ", "  D        13 "))]
    assert len(masks) == 2
    assert all(line.count("|") == 1 and line[-1] in "#." for line in masks)


def test_each_request_has_a_color(comparison: Comparison) -> None:
    assert "\x1b[" in report(comparison, color=True)
    assert "\x1b[" not in report(comparison)


@pytest.mark.parametrize(
    ("jobs", "settings"),
    [
        (make_jobs(), {}),
        (make_jobs((3,), (1,)), {}),
        (make_jobs((30, 4), (9, 300)), {"token_budget": 2}),
        (make_jobs(range(3, 23), range(3, 98, 5)), {"slots": 8, "token_budget": 64}),
    ],
    ids=["built-in", "least", "narrow", "many"],
)
def test_in_the_picture_no_text_lies_on_another_or_outside(jobs: list[Job], settings: dict[str, int]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure = draw(make_comparison(jobs, **settings))
    FigureCanvasAgg(figure).draw()
    ticks = [label for ax in figure.axes for label in ax.get_xticklabels()]  # some are beyond the axis, and not drawn
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in ticks]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    assert len(boxes) > 10
    for name, box in boxes:
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, name
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, name
    for i, (name, box) in enumerate(boxes):
        for other_name, other in boxes[:i]:
            width = min(box.x1, other.x1) - max(box.x0, other.x0)
            height = min(box.y1, other.y1) - max(box.y0, other.y0)
            # a text's box is taller than its ink
            assert width <= 1 or height <= 0.35 * box.height, f"{name!r} lies on {other_name!r}"


def test_the_picture_is_a_slide_of_3200_by_1800(comparison: Comparison, tmp_path: Path) -> None:
    from matplotlib.image import imread

    save_picture(comparison, tmp_path / "mask.png")
    pixels = imread(tmp_path / "mask.png")
    assert pixels.shape[:2] == (1800, 3200)
    assert (pixels[0] == 1).all(), "the margin is white"


def test_a_picture_that_cannot_be_saved_is_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ending") as caught:
        check_can_save(tmp_path / "mask.txt")
    assert "png" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="there is no directory"):
        check_can_save(tmp_path / "nowhere" / "mask.png")
    check_can_save(tmp_path / "mask.svg")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        check_can_save(tmp_path / "mask.png")
    assert "pip install matplotlib" in (caught.value.hint or "")


def test_prompts_are_read_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello", "max_tokens": 20}\n\n{"max_tokens": 3, "prompt": "缆车"}\n', encoding="utf-8")
    assert read_prompts(path) == [("Hello", 20), ("缆车", 3)]


@pytest.mark.parametrize(
    "line",
    ["Hello", "[]", '{"prompt": "Hello"}', '{"prompt": "Hello", "max_tokens": 0}', '{"prompt": 5, "max_tokens": 1}',
     '{"prompt": "Hello", "max_tokens": 3, "temperature": 1}', '{"prompt": "Hello", "max_tokens": true}'],
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello", "max_tokens": 20}\n' + line)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: expected"):
        read_prompts(path)


def test_a_prompts_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl")
