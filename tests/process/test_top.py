"""`elastane top` of real jobs, in a pipe and in a pseudo terminal."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from view_events import event, exited, settled, started

from elastane.cli.main import main
from elastane.errors import ExitCode
from elastane.observe.events import encode_line
from elastane.process.files import JobEntry, JobRegistry, process_start, runtime_folder
from elastane.testing import LocalCluster

# Generous: the bound of a test that fails on a busy machine.
DEADLINE_S = 90.0
SCRIPT = """
import sys, time
from pathlib import Path
import elastane
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
    elastane.should_checkpoint()
"""
STORY = [
    settled(1, "a", 2, time_s=1e9),
    started("a", 1, 2, round=1, attempt=0, time_s=1e9 + 1),
    exited(1, round=1, time_s=1e9 + 20),
    settled(2, "a", 1, time_s=1e9 + 21),
    started("a", 1, round=2, attempt=0, time_s=1e9 + 22),
]
ENDED = event("job-ended", ok=True, time_s=1e9 + 60, reason="all workers succeeded")
_SEQUENCE = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])")
# A read may end within a sequence.
_TORN = re.compile(r"\x1b(\[\??[\d;]*)?$")


class Screen:
    """The rows that a terminal shows, from the few sequences that frames use."""

    def __init__(self):
        self.rows, self.row = {}, 1
        self.is_other, self.is_cursor_hidden = False, False
        self.after, self._rest = "", ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def feed(self, data):
        text = self._rest + self._decode(data)
        torn = _TORN.search(text)
        text, self._rest = (text[: torn.start()], torn[0]) if torn else (text, "")
        place = 0
        for found in _SEQUENCE.finditer(text):
            self._put(text[place : found.start()])
            self._obey(found[1], found[2])
            place = found.end()
        self._put(text[place:])

    def text(self):
        return "\n".join(self.rows[row] for row in sorted(self.rows))

    def _put(self, text):
        if not self.is_other:
            self.after += text
        elif text:
            self.rows[self.row] = self.rows.get(self.row, "") + text

    def _obey(self, numbers, letter):
        match letter, numbers:
            case "H", _:
                self.row = int(numbers.split(";")[0])
            case "K", "2":
                self.rows[self.row] = ""
            case "J", "2":
                self.rows.clear()
            case (("h" | "l"), "1049"):
                self.is_other = letter == "h"
                self.after = ""
            case (("h" | "l"), "25"):
                self.is_cursor_hidden = letter == "l"
            case "m", _:
                pass
            case _:
                raise AssertionError(
                    f"a sequence that this screen does not know: {numbers}{letter}"
                )


class Person:
    """A user who runs `elastane top` in a terminal: types, looks, resizes the window."""

    def __init__(self, *words, size=(80, 24), env=None):
        self.screen = Screen()
        self.master, slave = pty.openpty()
        self.slave = slave
        self.resize(*size)
        self.mode = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "elastane", "top", *map(str, words)],
            stdin=slave, stdout=slave, stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(env or {})},
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def resize(self, columns, rows):
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def types(self, keys):
        os.write(self.master, keys)

    def sees(self, *words, deadline_s=DEADLINE_S):
        """Wait until all words are on the screen; return the screen."""
        self.looks(lambda: all(word in self.screen.text() for word in words), f"see {words}",
                   deadline_s)  # fmt: skip
        return self.screen.text()

    def looks(self, condition, what, deadline_s=DEADLINE_S):
        end_s = time.monotonic() + deadline_s
        while not condition():
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"not within {deadline_s} s: {what}\n{self.screen.text()}"
            self._read(min(left_s, 0.1))

    def _read(self, timeout_s):
        if select.select([self.master], [], [], timeout_s)[0]:
            self.screen.feed(os.read(self.master, 1 << 16))

    def leaves(self):
        """Wait for the end of the command; return its exit code and the final terminal."""
        self.looks(lambda: self.process.poll() is not None, "the end")
        while select.select([self.master], [], [], 0)[0]:
            self._read(0)
        assert not self.screen.is_other and not self.screen.is_cursor_hidden
        assert termios.tcgetattr(self.slave) == self.mode, "the terminal is as it was"
        return self.process.returncode, self.screen.after.replace("\r\n", "\n")


def write(folder, *events):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.h.jsonl").open("ab") as file:
        file.writelines(encode_line(one) for one in events)


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Set a runtime folder and a folder of logs of this test."""
    private = tmp_path / "run"
    private.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private))
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path / "logs"))
    for name in ("ELASTANE_TOKEN", "NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def over(tmp_path):
    """Return the folder of an ended job."""
    folder = tmp_path / "logs" / "over"
    write(folder, *STORY, ENDED)
    return folder


def printed(*words, **env):
    return subprocess.run(
        [sys.executable, "-m", "elastane", "top", *map(str, words)],
        env={**os.environ, "LANG": "C.UTF-8", **env},
        capture_output=True, timeout=DEADLINE_S, check=True,
    ).stdout.decode(env.get("PYTHONIOENCODING", "utf-8"))  # fmt: skip


def test_a_job_is_watched_from_its_start_over_a_kill_and_a_resized_window_to_its_end(tmp_path):
    script, enough = tmp_path / "counted.py", tmp_path / "enough"
    script.write_text(SCRIPT)
    cluster = LocalCluster(
        [script, str(enough)], folder=tmp_path / "c", nnodes=1, nproc_per_node=2, max_restarts=3
    )
    with cluster:
        node = cluster.start("a")
        cluster.wait_event("workers-training")
        with Person() as person:
            person.sees("● training", "2 workers on 1 node", "steps/s", "none so far")
            row = re.compile(r"a \*  +● training +[\d,]+ +[\d.]+  0-1")
            person.looks(lambda: row.search(person.screen.text()), "the node with its rate")
            cluster.node("a").kill_worker(1)
            person.sees("1 fault", "recovered", "SIGKILL", "restarts 1 of 3 used", "rebuilding")
            once = printed(cluster.job)
            assert "\x1b" not in once and "1 fault" in once and "● training" in once
            person.resize(50, 20)
            person.looks(
                lambda: len(person.screen.rows) == 20 and "● training" in person.screen.text(),
                "a frame of the new size",
            )
            assert max(map(len, person.screen.text().splitlines())) <= 50
            person.resize(120, 40)
            person.looks(lambda: len(person.screen.rows) == 40, "a frame of the next size")
            enough.touch()
            code, left = person.leaves()
        assert code == 0
        assert "✓ done" in left and "1 fault" in left and "q leaves" not in left
        assert re.search(r"a \*  +✓ done", left), "the last frame has what the agents logged last"
        assert node.wait() == 0


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        (lambda person: person.types(b"q"), 0),
        (lambda person: person.types(b"\x03"), 0),
        (lambda person: person.process.send_signal(signal.SIGINT), 0),
        (lambda person: person.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
        (lambda person: person.process.send_signal(signal.SIGHUP), 128 + signal.SIGHUP),
    ],
    ids=["q", "ctrl-c", "SIGINT", "SIGTERM", "SIGHUP"],
)
def test_leaving_restores_the_terminal_and_keeps_the_last_frame(tmp_path, leave, code):
    write(tmp_path / "logs" / "silent", *STORY)
    with Person("silent") as person:
        person.sees("? silent", "no event for", "q leaves")
        assert person.screen.is_cursor_hidden
        assert termios.tcgetattr(person.slave) != person.mode, "keys are not echoed"
        leave(person)
        assert person.leaves()[0] == code
        assert "? silent" in person.screen.after


def test_a_stopped_view_restores_the_terminal_until_it_continues(tmp_path):
    write(tmp_path / "logs" / "silent", *STORY)
    with Person("silent") as person:
        person.sees("? silent")
        person.types(b"\x1a")
        _, status = os.waitpid(person.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        person.looks(lambda: not person.screen.is_other, "the terminal of before")
        assert termios.tcgetattr(person.slave) == person.mode
        person.screen.rows.clear()
        person.process.send_signal(signal.SIGCONT)
        person.sees("? silent", "q leaves")
        person.types(b"q")
        assert person.leaves()[0] == 0


def test_a_job_that_is_over_leaves_its_frame_and_is_not_touched(over):
    def state():
        return {path: path.stat() for path in over.rglob("*")}

    before = state()
    with Person(over) as person:
        code, left = person.leaves()
    assert code == 0 and "✓ done" in left and "#1" in left and "Rank 1 on a: SIGKILL" in left
    assert [(p, s.st_mtime_ns, s.st_size) for p, s in state().items()] == [
        (p, s.st_mtime_ns, s.st_size) for p, s in before.items()
    ]


def test_a_view_of_a_job_that_others_run_moves_with_its_log(tmp_path):
    folder = tmp_path / "logs" / "far"
    write(folder, *STORY[:2])
    with Person("far") as person:
        person.sees("INCIDENTS   0 faults")
        write(folder, *STORY[2:])
        person.sees("INCIDENTS   1 fault", "Rank 1 on a: SIGKILL", "of 2 workers")
        write(folder, ENDED)
        assert "all workers succeeded" in person.leaves()[1]


@pytest.mark.parametrize("size", [(1, 1), (12, 3), (60, 10), (300, 80)])
def test_a_terminal_of_any_size_is_filled_and_not_exceeded(tmp_path, size):
    write(tmp_path / "logs" / "silent", *STORY)
    with Person("silent", size=size) as person:
        person.looks(lambda: len(person.screen.rows) == size[1], "a frame")
        assert max(map(len, person.screen.text().split("\n"))) <= size[0]
        person.types(b"q")
        assert person.leaves()[0] == 0


def test_without_a_capable_terminal_one_frame_is_printed(over):
    frame = printed("over")
    assert "✓ done" in frame and "\x1b" not in frame
    assert max(map(len, frame.splitlines())) <= 80
    assert "\x1b" not in printed("over", "--once") and "✓ done" in printed(over)
    assert any(len(line) > 100 for line in printed("over", COLUMNS="120").splitlines())
    ascii_alone = printed("over", PYTHONIOENCODING="ascii")
    assert ascii_alone.isascii() and "v done" in ascii_alone and "?" not in ascii_alone
    with Person(over, env={"TERM": "dumb"}) as person:
        code, left = person.leaves()
    assert code == 0 and "✓ done" in left


def test_frames_without_colours_say_the_same(tmp_path):
    write(tmp_path / "logs" / "silent", *STORY)
    with Person("silent", env={"NO_COLOR": "1"}) as person:
        person.sees("? silent", "#1", "recovered")
        person.types(b"q")
        person.leaves()


def test_a_job_that_is_not_there_is_named_with_the_next_step(tmp_path, over, capsys):
    assert main(["top", "none"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "no job 'none'" in said and "[no-such-job]" in said
    assert "elastane top --log-dir DIR JOB" in said and "over" in said
    assert main(["top"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "no job of this user runs on this machine" in said and "[no-such-job]" in said
    write(tmp_path / "logs" / "second", *STORY)
    assert main(["top", str(tmp_path / "logs")]) == ExitCode.USAGE
    assert "[several-jobs]" in capsys.readouterr().err


def test_without_a_name_the_one_job_that_runs_here_is_shown(tmp_path, over, capsys):
    def runs(job, log_dir):
        pid = os.getpid()
        entry = JobEntry(job=job, node="a", endpoint="127.0.0.1:1", token="", pid=pid,
                         process=process_start(pid), log_dir=str(log_dir))  # fmt: skip
        JobRegistry(runtime_folder(os.environ)).write(entry)

    runs("over", tmp_path / "logs")
    assert "elastane top   demo" in printed()
    runs("mute", "")
    assert main(["top", "mute"]) == ExitCode.USAGE
    assert "job mute keeps no event log" in capsys.readouterr().err
    assert main(["top"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "2 jobs run on this machine" in said and "one of mute, over" in said
