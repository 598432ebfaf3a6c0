"""`elastane logs`: the selected files, their order, and --follow."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastane.cli.main import main
from elastane.process.files import safe_name


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Return the logs of two attempts of two workers on two nodes, with alternating times."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    for attempt in (0, 1):
        for rank, node in enumerate(("host-a", "host-b")):
            worker = Worker(tmp_path / "logs", "job", (1, attempt, rank), node)
            for turn in range(2):
                worker.say(f"a{attempt} rank{rank} turn{turn}", attempt * 100 + turn * 10 + rank)
    Worker(tmp_path / "logs", "job", (1, 0, 1), "host-b", "stderr").say("a0 oops", 15)
    return tmp_path / "logs"


class Worker:
    """Writes the files of a worker as its agent does."""

    def __init__(self, base, job, place, node, std="stdout"):
        round_, attempt, rank = place
        self.folder = base / safe_name(job) / f"round_{round_}/attempt_{attempt}/rank_{rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        note = {"node": node, "host": node, "role": "default", "rank": rank, "local_rank": 0}
        (self.folder / "worker.jsonl").write_text(json.dumps(note) + "\n")
        self.note = note
        self.path = self.folder / f"{std}.log"

    def say(self, text, at_s, end="\n"):
        with self.path.open("ab") as file:
            file.write((text + end).encode())
        with Path(f"{self.path}.idx").open("ab") as file:
            file.write(struct.pack("<QQ", self.path.stat().st_size, int(at_s * 1e9)))

    def becomes(self, rank, at_s, round_):
        """Record that the worker has another rank from then on, as its agent does."""
        place = {"rank": rank, "round": round_, "attempt": 0, "time_ns": int(at_s * 1e9)}
        with (self.folder / "worker.jsonl").open("a") as file:
            file.write(json.dumps({**self.note, **place}) + "\n")


def shown(capsysbinary, *words):
    assert main(["logs", *map(str, words)]) == 0
    return capsysbinary.readouterr().out.decode().splitlines()


def bodies(lines):
    return [line.partition("]: ")[2] for line in lines]


def test_without_options_the_output_of_workers_follows_one_after_the_other(base, capsysbinary):
    lines = shown(capsysbinary, "job", "--log-dir", base)
    assert lines[0] == "[default0 host-a r1.0 out]: a0 rank0 turn0"
    assert bodies(lines) == [
        "a0 rank0 turn0",
        "a0 rank0 turn1",
        "a0 rank1 turn0",
        "a0 rank1 turn1",
        "a0 oops",
        "a1 rank0 turn0",
        "a1 rank0 turn1",
        "a1 rank1 turn0",
        "a1 rank1 turn1",
    ]


def test_lines_merged_by_time_have_their_time(base, capsysbinary):
    lines = shown(capsysbinary, "job", "--log-dir", base, "--merge-by-time", "--attempt", "0")
    assert bodies(lines) == [
        "a0 rank0 turn0",
        "a0 rank1 turn0",
        "a0 rank0 turn1",
        "a0 rank1 turn1",
        "a0 oops",
    ]
    assert lines[1].startswith("01-01 00:00:01.000 [default1 host-b r1.0 out]: ")


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--rank", "1"], 5),
        (["--rank", "0-1"], 9),
        (["--node", "host-a"], 4),
        (["--attempt", "1"], 4),
        (["--round", "2,1"], 9),
        (["--stderr"], 1),
        (["--stdout"], 8),
        (["--stdout", "--stderr", "--rank", "1", "--attempt", "0"], 3),
    ],
)
def test_options_select_workers_streams_and_attempts(base, capsysbinary, options, count):
    lines = shown(capsysbinary, "job", "--log-dir", base, *options)
    assert len([line for line in lines if not line.startswith("---")]) == count


def test_job_is_found_by_its_folder_or_by_the_folder_of_one_job(base, capsysbinary):
    assert len(shown(capsysbinary, base / "job")) == 9
    assert len(shown(capsysbinary, base)) == 9


def refused(capsys, *words):
    assert main(["logs", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_an_unknown_job_is_refused_with_the_existing_ones(base, capsys):
    said = refused(capsys, "nope", "--log-dir", base)
    assert "no job 'nope'" in said
    assert "one of job" in said
    for number in range(11):
        (base / f"job-{number}").mkdir()
        os.utime(base / f"job-{number}", (number, number))
    assert "job-10, job-9, job-8" in (said := refused(capsys, "nope", "--log-dir", base))
    assert "job-1," not in said and "and 2 older ones" in said


def test_folder_of_several_jobs_is_refused_with_their_names(base, capsys):
    Worker(base, "other/job", (1, 0, 0), "host-a").say("x", 1)
    said = refused(capsys, base)
    assert "2 jobs" in said
    assert safe_name("other/job") in said


def test_a_selection_without_matches_names_the_options_that_made_it(base, capsys):
    assert "leave out --rank" in refused(capsys, base, "--rank", "7")


def test_lines_are_whole_at_the_ends_of_read_blocks(tmp_path, capsysbinary):
    worker = Worker(tmp_path, "job", (1, 0, 0), "host-a")
    sizes = [1, 32767, 32768, 40000, 65535, 0, 200, 10]
    for number, size in enumerate(sizes):
        worker.say("x" * size, number)
    worker.say("no end", 99, end="")
    lines = bodies(shown(capsysbinary, tmp_path, "--merge-by-time"))
    assert [len(line) for line in lines] == [*sizes, len("no end")]


def test_an_unterminated_line_of_any_length_is_shown_in_pieces(tmp_path, capsysbinary):
    Worker(tmp_path, "job", (1, 0, 0), "host-a").say("x" * 300_000, 1, end="")
    lines = bodies(shown(capsysbinary, tmp_path))
    assert sum(map(len, lines)) == 300_000
    assert max(map(len, lines)) <= 64 << 10


def test_a_file_without_index_or_note_is_shown(tmp_path, capsysbinary):
    worker = Worker(tmp_path, "job", (1, 0, 3), "host-a")
    worker.path.write_text("plain\n")
    (worker.folder / "worker.jsonl").write_text('{"torn')
    lines = shown(capsysbinary, tmp_path, "--merge-by-time")
    assert lines[0].endswith("[rank3 r1.0 out]: plain")


def test_follow_shows_existing_lines_new_lines_and_later_workers(base):
    process = subprocess.Popen(
        [sys.executable, "-m", "elastane", "logs", str(base), "--follow", "--rank", "0,5"],
        stdout=subprocess.PIPE,
    )
    try:
        read = [process.stdout.readline() for _ in range(5)]
        assert read[0].endswith(b"a0 rank0 turn0\n")
        late = Worker(base, "job", (2, 0, 5), "host-c")
        late.say("hel", 300, end="")
        late.say("lo", 301)
        assert process.stdout.readline() == b"[default5 host-c r2.0 out]: hello\n"
        process.send_signal(2)
        assert process.wait(90) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def replaced(tmp_path):
    """Return the logs of a job in place that loses rank 0 of three after 20 s and gets a standby.

    Rank 1 is rank 0 until the standby has come, and rank 1 again then.
    """
    first, second, standby = (
        Worker(tmp_path / "logs", "job", (1, 0, rank), node)
        for rank, node in ((0, "host-a"), (1, "host-b"), (3, "host-a"))
    )
    first.say("step 1 of the first", 10)
    second.say("step 1 of the second", 10)
    second.becomes(0, 20, 2)
    standby.say("loads", 25)
    second.say("step 2 of the second", 30)
    second.becomes(1, 40, 3)
    standby.becomes(0, 40, 3)
    second.say("step 3 of the second", 50)
    standby.say("step 3 of the standby", 50.1)
    return tmp_path / "logs"


def test_a_rank_is_what_each_worker_printed_while_it_had_that_rank(replaced, capsysbinary):
    assert shown(capsysbinary, replaced, "--rank", "0") == [
        "[default0 host-a r1.0 out]: step 1 of the first",
        "--- rank 0 is local rank 0 on node host-b, started in round 1, from round 2 attempt 0 on;"
        " before: local rank 0 on node host-a, started in round 1 ---",
        "[default0 host-b r2.0 out]: step 2 of the second",
        "--- rank 0 is local rank 0 on node host-a, started in round 1, from round 3 attempt 0 on;"
        " before: local rank 0 on node host-b, started in round 1 ---",
        "[default0 host-a r3.0 out]: step 3 of the standby",
    ]
    assert bodies(shown(capsysbinary, replaced, "--rank", "1")) == [
        "step 1 of the second",
        "step 3 of the second",
    ]
    lines = shown(capsysbinary, replaced, "--rank", "0-1", "--merge-by-time")
    assert [line.partition(" ")[2][13:] for line in lines if "---" not in line] == [
        "[default0 host-a r1.0 out]: step 1 of the first",
        "[default1 host-b r1.0 out]: step 1 of the second",
        "[default0 host-b r2.0 out]: step 2 of the second",
        "[default1 host-b r3.0 out]: step 3 of the second",
        "[default0 host-a r3.0 out]: step 3 of the standby",
    ]


def test_without_ranks_all_output_is_shown_once_with_the_rank_of_its_time(replaced, capsysbinary):
    lines = shown(capsysbinary, replaced)
    assert len(lines) == 6 and not any(line.startswith("---") for line in lines)
    assert "[default3 host-a r1.0 out]: loads" in lines
    assert bodies(shown(capsysbinary, replaced, "--round", "3", "--rank", "0")) == [
        "step 3 of the standby"
    ]


def test_a_line_that_is_seen_after_the_change_of_its_worker_is_not_lost(replaced, capsysbinary):
    """Its time is that of the next look at the file, up to a quarter of a second later."""
    worker = Worker(replaced, "job", (1, 0, 2), "host-b")
    worker.becomes(0, 60, 4)
    worker.say("the last of rank 0", 70.2)
    worker.becomes(2, 70, 5)
    assert "the last of rank 0" in bodies(shown(capsysbinary, replaced, "--rank", "0"))


def test_follow_shows_a_replacement_from_when_it_took_the_rank(replaced):
    late = Worker(replaced, "job", (3, 0, 5), "host-c")
    late.say("loads", 60)
    process = subprocess.Popen(
        [sys.executable, "-m", "elastane", "logs", str(replaced), "--follow", "--rank", "0"],
        stdout=subprocess.PIPE,
    )
    try:
        for _ in range(5):
            process.stdout.readline()
        late.becomes(0, 61, 4)
        late.say("step 4", 62)
        assert process.stdout.readline().startswith(b"--- rank 0 is local rank 0 on node host-c,")
        assert process.stdout.readline() == b"[default0 host-c r4.0 out]: step 4\n"
    finally:
        process.kill()
        process.communicate()


def test_a_closed_pipe_ends_without_a_stack_trace(base):
    for number in range(3):
        Worker(base, "job", (3, number, 0), "host-a").say("x" * 60000, 1)
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.Popen(
        [sys.executable, "-m", "elastane", "logs", str(base)],
        stdout=write_end,
        stderr=subprocess.PIPE,
    )
    os.close(write_end)
    _, err = process.communicate(timeout=90)
    assert err == b""
