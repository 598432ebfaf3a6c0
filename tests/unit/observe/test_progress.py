"""Long transfers show their progress: as a bar on a terminal, as one line in a log."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from elastane.observe import progress
from elastane.observe.progress import shown_progress, size_text, writing_progress

GB = 10**9


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    return now_s


def test_a_long_transfer_gets_one_line_in_a_log(clock, capsys):
    with shown_progress("reading step 40", 8 * GB) as shown:
        shown.add(GB)
        clock[0] += 1.9
        shown.add(GB)
        assert capsys.readouterr().err == ""
        clock[0] += 0.1
        shown.reach(4 * GB)
        said = "elastane: reading step 40: 4 GB of 8 GB in 2.0 s, about 2 s left\n"
        assert capsys.readouterr().err == said
        clock[0] += 60.0
        shown.add(GB)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_that_is_removed_at_the_end(clock, monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with shown_progress("reading step 40", 8 * GB) as shown:
        shown.add(GB)
        assert screen.getvalue() == ""
        clock[0] += 2.0
        shown.add(GB)
        assert "reading step 40" in screen.getvalue() and "elastane:" not in screen.getvalue()
    assert screen.getvalue().rstrip().endswith("\x1b[2K"), "the line of the bar is erased"


def test_many_threads_report_what_each_has_done(clock, capsys):
    with shown_progress("reading step 40", 8000) as shown:
        threads = [
            threading.Thread(target=lambda: [shown.add(1) for _ in range(1000)]) for _ in range(7)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        clock[0] += 2.0
        shown.add(0)
    assert "7 kB of 8 kB" in capsys.readouterr().err


def test_the_progress_of_a_file_that_another_program_writes_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "_LOOK_S", 0.001)
    told = threading.Event()
    monkeypatch.setattr(progress.ShownProgress, "_print", lambda self, took_s: told.set())
    path = tmp_path / "all.pt"
    with writing_progress("writing all.pt", 100, path):
        path.write_bytes(bytes(10))
        assert told.wait(30)


def test_a_closed_stderr_loses_the_line_alone(clock, monkeypatch):
    closed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", closed)
    with shown_progress("reading step 40", 10) as shown:
        clock[0] += 2.0
        closed.isatty = lambda: False
        closed.write = lambda text: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        shown.add(1)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2 * GB, "2 GB")]
)
def test_sizes_have_a_unit_that_fits(count, text):
    assert size_text(count) == text
