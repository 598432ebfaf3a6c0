"""The workers' stderr reaches the agent's stderr unchanged, and its end is kept."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_harness import until
from supervise import Agent, agent, write_script


@pytest.mark.parametrize("start", ["--no-zygote", "--preload"])
def test_all_output_is_shown_unchanged_before_the_box(tmp_path: Path, start: str) -> None:
    body = """
    blob = b"".join(b"%05d \\x1b[1m bytes\\xff\\r\\n" % n for n in range(40_000))
    at = 0
    while at < len(blob):
        at += os.write(2, blob[at:])
    os.write(2, b"the very last words, without an end")
    raise SystemExit(3)
    """
    words = (start, "json") if start == "--preload" else (start,)
    with agent(tmp_path, *words, body=body) as one:
        assert one.wait() == 1
        err = (tmp_path / "err").read_bytes()
        blob = b"".join(b"%05d \x1b[1m bytes\xff\r\n" % n for n in range(40_000))
        at = err.find(blob)
        assert at >= 0, "all of it, in order, in one piece"
        rest = err[at + len(blob) :]
        assert rest.startswith(b"the very last words, without an end")
        assert "╔".encode() in rest, "the box comes last"


def test_output_to_a_reopened_dev_stderr_is_shown(tmp_path: Path) -> None:
    body = """
    for n in range(50):
        os.system(f"echo anew {n} > /dev/stderr")
        os.write(2, b"mine %d\\n" % n)
    """
    with agent(tmp_path, body=body) as one:
        assert one.wait() == 0
        said = [line for line in one.err.splitlines() if line.startswith(("anew", "mine"))]
        assert said == [f"{word} {n}" for n in range(50) for word in ("anew", "mine")]


def test_a_terminal_stays_the_workers_own(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    one = Agent(tmp_path)
    (tmp_path / "err").touch()
    script = write_script(tmp_path, "tell('tty', os.isatty(2))")
    try:
        words = ("--standalone", "--log-dir", "logs", "--no-zygote", script)
        one.start(*words, stdio=(subprocess.DEVNULL, subprocess.DEVNULL, slave))
        assert one.told("tty.0.0") == "True"
        assert one.wait() == 0
    finally:
        one.kill_all()
        os.close(slave)
        os.close(master)


def test_a_flood_costs_the_agent_no_memory_and_little_time(tmp_path: Path) -> None:
    """200 MB of stderr: 30 MB of agent and 0.2 s of its time (two cores, 2026-11-21)."""
    body = """
    block = (b"x" * 99 + b"\\n") * 600
    for _ in range(200_000_000 // len(block)):
        os.write(2, block)
    tell("said")
    wait_for("measured")
    """
    one = Agent(tmp_path)
    (tmp_path / "err").touch()
    script = write_script(tmp_path, body)
    count = "import sys\nn=0\nwhile d:=sys.stdin.buffer.read(1<<20): n+=len(d)\nprint(n)"
    with subprocess.Popen(
        [sys.executable, "-c", count], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        try:
            assert reader.stdin is not None and reader.stdout is not None
            words = ("--standalone", "--log-dir", "logs", "--no-zygote", script)
            one.start(*words, stdio=(subprocess.DEVNULL, subprocess.DEVNULL, reader.stdin.fileno()))
            reader.stdin.close()
            one.told("said.0.0")
            status = Path(f"/proc/{one.pid}/status").read_text()
            memory_kb = int(status.partition("VmHWM:")[2].split()[0])
            times = Path(f"/proc/{one.pid}/stat").read_text().rpartition(") ")[2].split()
            used_s = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
            (tmp_path / "measured").touch()
            assert one.wait() == 0
            assert int(reader.stdout.read()) >= 200_000_000 - 60_000
        finally:
            one.kill_all()
    assert memory_kb < 48 << 10
    assert used_s < 5.0


def test_a_killed_agent_leaves_nothing_of_it_behind(tmp_path: Path) -> None:
    body = """
    tell("up")
    while True:
        os.write(2, b"and on and on\\n")
    """
    with agent(tmp_path, "--nproc-per-node", "2", body=body) as one:
        one.told("up.0.0")
        one.told("up.1.0")
        one.send(signal.SIGKILL)
        one.wait()
        one.gone()


def test_a_hidden_workers_stderr_end_is_kept(tmp_path: Path) -> None:
    """Its last lines are in the report of its failure, although its stderr had no file."""
    from elastane.agent.failure_reports import read_last_words
    from elastane.process.streams.group import GroupStreams
    from elastane.process.streams.plan import LogPlan
    from elastane.protocol.model import Fence

    plan = LogPlan("/dev/null", console_ranks=frozenset({1}))
    streams = GroupStreams(plan, "job", "host-a", Fence(1, 0))
    opened = streams.open(0, 0, "default")
    os.write(opened.stderr, b"Traceback\nValueError: no\n")
    streams.close_worker_ends()
    streams.drain(opened)
    assert "ValueError: no" in read_last_words(opened).message
    until(lambda: streams._pump.is_running, "the thread runs")
    import asyncio

    asyncio.run(streams.finish())
