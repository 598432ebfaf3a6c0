"""Worker output with real processes: the console, the files, and the cost of faults.

Each test runs a small agent (`AGENT`), whose stdout and stderr are the console.
"""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from process_harness import DEADLINE_S

from elastane.process.streams.bounds import SKIP_TELL_S

AGENT = """
import asyncio, itertools, json, logging, os, subprocess, sys, time
from elastane.process.streams import bounds

spec = json.loads(sys.argv[1])
bounds.FINISH_S = spec.get("finish_s", bounds.FINISH_S)
from elastane.protocol.model import Fence
from elastane.process.streams.group import GroupStreams
from elastane.process.streams.plan import LogPlan, parse_std_map

logging.basicConfig(level=logging.WARNING, format="%(message)s")

def rss_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

async def tick():
    for number in itertools.count():
        with open(spec["ticks"], "w") as file:
            file.write(str(number))
        await asyncio.sleep(0.05)

async def main():
    count = len(spec["workers"])
    plan = LogPlan(
        spec["dir"],
        parse_std_map(spec.get("redirects", "0"), count),
        parse_std_map(spec.get("tee", "0"), count),
        frozenset(spec.get("only", ())),
    )
    streams = GroupStreams(plan, "job", "host-a", Fence(2, 1))
    before_kib = rss_kib()
    opened = [streams.open(i, 4 + i, "default") for i in range(count)]
    ticks = asyncio.create_task(tick())
    start = asyncio.create_subprocess_exec
    workers = [
        await start(sys.executable, "-c", code, stdout=s.stdout, stderr=s.stderr)
        for code, s in zip(spec["workers"], opened)
    ]
    streams.close_worker_ends()
    codes = [await worker.wait() for worker in workers]
    began = time.monotonic()
    await streams.finish()
    ticks.cancel()
    report = {
        "codes": codes, "paths": [[s.stdout_path, s.stderr_path, s.error_file] for s in opened],
        "grown_kib": rss_kib() - before_kib,
        "finish_s": time.monotonic() - began, "fds": len(os.listdir("/proc/self/fd")),
    }
    with open(spec["report"], "w") as file:
        json.dump(report, file)

fds = len(os.listdir("/proc/self/fd"))
asyncio.run(main())
assert len(os.listdir("/proc/self/fd")) <= fds, "descriptors leaked"
"""

# One write a line: two workers share a console, and Python may run unbuffered.
SPEAKER = 'import sys; sys.stdout.write("out {0}\\n"); sys.stderr.write("err {0}\\n")'


@pytest.fixture
def agent(tmp_path):
    """Start an agent over workers; yield its process, for a test that watches it live."""
    started = []

    def start(workers, stdout=subprocess.PIPE, **options):
        (tmp_path / "ticks").touch()
        spec = {
            "dir": str(tmp_path / "logs"),
            "report": str(tmp_path / "report.json"),
            "ticks": str(tmp_path / "ticks"),
            "workers": [textwrap.dedent(code) for code in workers],
            **options,
        }
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT, json.dumps(spec)], stdout=stdout, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process, tmp_path):
    """Wait for an agent; return its console's stdout and stderr, and its report."""
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err.decode()
    return (out or b"").decode(), err.decode(), json.loads((tmp_path / "report.json").read_text())


def test_plain_output_goes_to_the_console_untouched_and_a_copy_is_kept(agent, tmp_path):
    out, err, report = ended(agent([SPEAKER.format(0)]), tmp_path)
    assert (out, err) == ("out 0\n", "err 0\n")
    kept = [Path(path) for path in report["paths"][0][:2]]
    assert [path.name for path in kept] == ["stdout.log", "stderr.log"]
    assert [path.read_text() for path in kept] == ["out 0\n", "err 0\n"]
    assert kept[0].with_name("stdout.log.idx").stat().st_size >= 16
    assert report["paths"][0][2].endswith("/logs/job/round_2/attempt_1/rank_4/error.json")
    assert Path(report["paths"][0][2]).parent.is_dir()


def test_redirected_streams_go_to_files_of_rank_and_fence_only(agent, tmp_path):
    process = agent([SPEAKER.format(0), SPEAKER.format(1)], redirects="0:3,1:1")
    out, err, _ = ended(process, tmp_path)
    assert (out, err) == ("", "err 1\n")
    attempt = tmp_path / "logs/job/round_2/attempt_1"
    assert (attempt / "rank_4/stdout.log").read_text() == "out 0\n"
    assert (attempt / "rank_4/stderr.log").read_text() == "err 0\n"
    assert (attempt / "rank_5/stdout.log").read_text() == "out 1\n"
    assert (attempt / "rank_4/stdout.log.idx").stat().st_size >= 16


def test_teed_streams_go_to_files_and_with_their_prefix_to_their_own_console(agent, tmp_path):
    process = agent([SPEAKER.format(0), SPEAKER.format(1)], tee="3")
    out, err, report = ended(process, tmp_path)
    assert sorted(out.splitlines()) == [
        "[default4 host-a r2.1]: out 0",
        "[default5 host-a r2.1]: out 1",
    ]
    assert sorted(err.splitlines())[1] == "[default5 host-a r2.1]: err 1"
    assert Path(report["paths"][1][0]).read_text() == "out 1\n"


def test_filtered_ranks_keep_their_files_and_leave_the_console(agent, tmp_path):
    process = agent([SPEAKER.format(0), SPEAKER.format(1)], tee="1", only=[1])
    out, err, report = ended(process, tmp_path)
    assert out == "[default5 host-a r2.1]: out 1\n"
    assert err == "err 1\n"
    assert Path(report["paths"][0][0]).read_text() == "out 0\n"


def test_second_run_of_the_same_job_appends_shows_only_its_own_and_has_its_own_error_file(
    agent, tmp_path
):
    _, _, first = ended(agent([SPEAKER.format("old")], tee="1"), tmp_path)
    Path(first["paths"][0][2]).write_text("{}")
    out, _, second = ended(agent([SPEAKER.format("new")], tee="1"), tmp_path)
    assert "new" in out
    assert "old" not in out
    assert Path(second["paths"][0][0]).read_text() == "out old\nout new\n"
    assert Path(second["paths"][0][2]).name == "error.1.json"


def test_lines_of_many_workers_are_never_mixed(agent, tmp_path):
    code = "for i in range(3000): print('{0}' * 60, flush=i % 7 == 0)"
    out, _, _ = ended(agent([code.format(c) for c in "abcd"], tee="1"), tmp_path)
    bodies = [line.partition(": ")[2] for line in out.splitlines()]
    assert len(bodies) == 12000
    assert {len(set(body)) for body in bodies} == {1}


# 100 MB/s for the first 300 MB, then a trickle: a busy host may need long for the turns.
FLOOD = """
import os, time
chunk = b"x" * (1 << 20)
begin = time.monotonic()
sent = 0
while not os.path.exists("{stop}"):
    os.write(1, chunk)
    sent += len(chunk)
    time.sleep(max(0, begin + sent / 100e6 - time.monotonic()) if sent < 300e6 else 0.2)
"""
# Each line waits until the last one was shown, and the agent's loop has run since.
CLOCK = """
import os, time
def ticks():
    with open("{ticks}") as file:
        return file.read()
for number in range(15):
    print("clock", number, flush=True)
    before = ticks()
    while not os.path.exists(f"{shown}{{number}}") or ticks() in ("", before):
        time.sleep(0.01)
"""


def test_worker_that_writes_100_mb_a_second_without_newlines_blocks_no_other(agent, tmp_path):
    """Another worker and the agent take turns while the flood lasts; it ends after all of them."""
    stop, shown = tmp_path / "stop", tmp_path / "shown"
    clock = CLOCK.format(ticks=tmp_path / "ticks", shown=shown)
    begun_s = time.monotonic()
    process = agent([FLOOD.format(stop=stop), clock], tee="1")
    late = threading.Timer(DEADLINE_S, stop.touch)
    late.start()
    turns, shown_bytes, skips = 0, 0, 0
    for line in process.stdout:
        shown_bytes += len(line)
        skips += b"bytes were not shown here" in line
        if b"clock" in line:
            assert not stop.exists(), "the flood held the other up"
            (tmp_path / f"shown{turns}").touch()
            turns += 1
        if turns == 15 and skips:
            stop.touch()
    late.cancel()
    lasted_s = time.monotonic() - begun_s
    _, _, report = ended(process, tmp_path)
    written_bytes = Path(report["paths"][0][0]).stat().st_size
    print(f"{report=} {lasted_s=} {shown_bytes=} {written_bytes=} {skips=}")
    assert report["codes"] == [0, 0]
    assert turns == 15
    assert 1 <= skips <= lasted_s / SKIP_TELL_S + 2, "skips are reported, at most once a second"
    assert shown_bytes < written_bytes
    assert report["grown_kib"] < 8 << 10


def test_console_without_a_reader_stops_no_worker_and_no_agent(agent, tmp_path):
    read_end, write_end = os.pipe()
    code = "for i in range(20000): print('line', i, 'x' * 50)"
    process = agent([code], stdout=write_end, tee="1", finish_s=DEADLINE_S)
    os.close(write_end)
    _, _, report = ended(process, tmp_path)
    os.close(read_end)
    assert report["codes"] == [0]
    assert report["finish_s"] < DEADLINE_S / 2, "it is stuck, so it does not get all of its time"
    assert Path(report["paths"][0][0]).read_text().count("\n") == 20000


def test_console_that_is_gone_stops_no_worker_and_no_agent(agent, tmp_path):
    read_end, write_end = os.pipe()
    process = agent([SPEAKER.format(0)], stdout=write_end, tee="3")
    os.close(write_end)
    os.close(read_end)
    _, err, report = ended(process, tmp_path)
    assert report["codes"] == [0]
    assert "err 0" in err
    assert Path(report["paths"][0][0]).read_text() == "out 0\n"


def test_unusable_log_folder_loses_the_files_with_one_warning(agent, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    process = agent([SPEAKER.format(0), SPEAKER.format(1)], redirects="3", dir=str(blocker / "d"))
    out, err, report = ended(process, tmp_path)
    assert report["codes"] == [0, 0]
    assert sorted(out.split("\n")) == ["", "out 0", "out 1"]
    assert err.count("no log files") == 1
    assert "[log-dir]" in err
    assert report["paths"] == [["", "", ""]] * 2


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_full_disk_under_the_log_folder_loses_the_files_with_one_warning(agent, tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no mount here: {made.stderr.decode()}")
    try:
        with (mount / "filler").open("wb", buffering=0) as filler:
            while True:
                try:
                    filler.write(b"x" * 4096)
                except OSError:
                    break
        process = agent([SPEAKER.format(0)], redirects="3", dir=str(mount))
        out, err, report = ended(process, tmp_path)
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    assert report["codes"] == [0]
    assert out == "out 0\n"
    assert "No space left on device" in err
    assert err.count("no log files") == 1


# The agent looks at redirected files now and then: a turn lasts until its line has a time.
TURNS = """
import os, pathlib, time
index = os.readlink("/proc/self/fd/1") + ".idx"
def until(condition):
    while not condition():
        time.sleep(0.02)
def noted():
    return os.stat(index).st_size if os.path.exists(index) else 0
for turn in range({first}, 6, 2):
    until(lambda: not turn or pathlib.Path({folder!r}, str(turn - 1)).exists())
    before = noted()
    print("turn", turn, flush=True)
    until(lambda: noted() > before)
    pathlib.Path({folder!r}, str(turn)).touch()
"""


def test_redirected_output_of_two_workers_is_merged_by_the_time_it_was_written(agent, tmp_path):
    (tmp_path / "turns").mkdir()
    workers = [TURNS.format(folder=str(tmp_path / "turns"), first=first) for first in (0, 1)]
    ended(agent(workers, redirects="3"), tmp_path)
    shown = subprocess.run(
        [sys.executable, "-m", "elastane", "logs", str(tmp_path / "logs"), "--merge-by-time"],
        capture_output=True,
        text=True,
        check=True,
    )
    turns = [line.partition("]: ")[2] for line in shown.stdout.splitlines()]
    assert turns == [f"turn {turn}" for turn in range(6)]
