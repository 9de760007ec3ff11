"""What the commands say to a person: errors, warnings, progress."""

from __future__ import annotations

import io
import sys

import pytest

from server.terminal import fail, show_progress, warn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"message": "no"}, "chairlift: no\n"),
        ({"message": "two\n  lines", "hint": "try this"}, "chairlift: two lines (try this)\n"),
        ({"message": "no", "setting": "kv_cache_tokens"}, "chairlift: --kv-cache-tokens: no\n"),
    ],
)
def test_fail_says_one_line(arguments: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        fail(**arguments, status=3)
    assert end.value.code == 3
    assert capsys.readouterr() == ("", line)


def test_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    warn(["one", "two"])
    assert capsys.readouterr() == ("", "chairlift: warning: one\nchairlift: warning: two\n")


def test_progress_in_a_log_is_a_line_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress() as report:
        report("downloading")
        report("downloading", 0.5)
        report("unpacking")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["downloading", "unpacking"]


def test_progress_in_a_terminal_is_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with show_progress() as report:
        report("downloading", 0.42)
        report("unpacking")
    shown = terminal.getvalue()
    assert "unpacking" in shown
    assert shown.index("downloading") < shown.index("unpacking")
    assert shown.endswith("\x1b[2K")  # wiped: the banner takes its place
