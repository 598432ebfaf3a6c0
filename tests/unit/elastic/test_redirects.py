"""redirects, tail_log, DefaultLogsSpecs and Std: the destinations of workers' output."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading

import pytest
from elastane.elastic.multiprocessing.redirects import redirect

from elastane.elastic.multiprocessing import DefaultLogsSpecs, Std, to_map
from elastane.elastic.multiprocessing.tail_log import TailLog, tail_logfile

REDIRECTED = """
import subprocess, sys
from elastane.elastic.multiprocessing.redirects import redirect_stdout
with redirect_stdout(sys.argv[1]):
    print("of python")
    sys.stdout.flush()
    subprocess.run(["echo", "of a child"], check=True)
print("after")
"""


def test_stdout_is_redirected_for_a_while_with_what_children_write(tmp_path):
    command = [sys.executable, "-c", REDIRECTED, str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (tmp_path / "out").read_text() == "of python\nof a child\n"
    assert ended.stdout == "after\n"
    with pytest.raises(ValueError, match="stdin"), redirect("stdin", "x"):
        pass


def test_files_are_shown_as_they_grow_under_their_names(tmp_path):
    shown = io.StringIO()
    files = {0: str(tmp_path / "0"), 1: str(tmp_path / "1")}
    tail = TailLog("w", files, shown, {1: "<one> "}, interval_sec=0.01).start()
    (tmp_path / "0").write_text("a\nb\n")
    (tmp_path / "1").write_bytes(b"c\xff\nwithout end")
    tail.stop()
    assert tail.stopped()
    assert sorted(shown.getvalue().splitlines()) == [
        "<one> c\ufffd", "<one> without end", "[w0]:a", "[w0]:b",
    ]  # fmt: skip
    finished, out = threading.Event(), io.StringIO()
    finished.set()
    tail_logfile("h:", files[0], out, finished, 0.01, lambda line: "b" in line)
    assert out.getvalue() == "h:b\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", Std.NONE),
        ("3", Std.ALL),
        ("0:3,1:2", {0: Std.ALL, 1: Std.ERR}),
        ("12:1", {12: Std.OUT}),
    ],
)
def test_streams_are_read_as_torch_writes_them(text, found):
    assert Std.from_str(text) == found


@pytest.mark.parametrize("text", ["", "4", "a", "0:4", "0:1,", "0-1"])
def test_a_text_that_names_no_streams_is_refused(text):
    with pytest.raises(ValueError, match="neither a stream mask nor a map"):
        Std.from_str(text)


def test_ranks_missing_in_a_map_get_no_stream():
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({1: Std.ERR}, 2) == {0: Std.NONE, 1: Std.ERR}


def test_the_files_of_an_attempt_are_never_those_of_another(tmp_path):
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT, tee={1: Std.ERR})
    envs = {0: {"TORCHELASTIC_RUN_ID": "r/1"}, 1: {}}
    first, second = specs.reify(envs), specs.reify(envs)
    assert first.stdouts[0] != second.stdouts[0], "the same restart count comes again"
    assert first.stderrs[0] == "" and first.tee_stderrs == {1: first.stderrs[1]}
    assert envs[0]["TORCHELASTIC_ERROR_FILE"] == second.error_files[0]
    assert set(first.stdouts) == {0, 1} and first.tee_stdouts == {}
    assert specs == DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT, tee={1: Std.ERR})
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        DefaultLogsSpecs(str(tmp_path / "file"))


def test_without_a_folder_nothing_is_kept():
    envs = {0: {}}
    dest = DefaultLogsSpecs(os.devnull, tee=Std.ALL).reify(envs)
    assert dest.stdouts == {0: ""} and envs[0]["TORCHELASTIC_ERROR_FILE"] == ""
