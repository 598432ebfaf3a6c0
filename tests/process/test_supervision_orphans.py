"""After any end of an agent, no process of a job is left, not even its workers' children."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_harness import until
from supervise import Agent, agent, alive, children, command_line, state, write_script

# A worker with a child like a DataLoader's, and below it a daemon in another session.
FAMILY = """
import multiprocessing, subprocess, sys
child = multiprocessing.get_context("fork").Process(target=hang, daemon=True)
child.start()
daemon = subprocess.Popen(["setsid", "sleep", "600"])
tell("family", f"{os.getpid()} {child.pid} {daemon.pid}")
hang()
"""
# Leaves a process behind without a parent, in its own session.
DAEMON = """
def leave_a_daemon():
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            os.write(write, str(os.getpid()).encode())
            os.close(write)
            hang()
        os._exit(0)
    os.close(write)
    os.wait()
    tell("daemon", os.read(read, 20).decode())
"""


def family_of(one: Agent) -> set[int]:
    """Return all processes of the running job: at least 2 x 3 of workers, agent, orphan reaper."""
    told = {int(word) for rank in (0, 1) for word in one.told(f"family.{rank}.0").split()}
    assert len(told) == 6
    found = one.family()
    assert told < found
    assert any("orphan_reaper.py" in command_line(pid) for pid in children(one.pid))
    return found


@contextlib.contextmanager
def terminal(folder: Path, body: str) -> Iterator[tuple[Agent, int]]:
    """Run two workers from a terminal; yield the agent and the terminal's other end."""
    write_script(folder, body)
    (folder / "err").touch()
    one = Agent(folder)
    master, slave = pty.openpty()
    words = ("--standalone", "--no-zygote", "--nproc-per-node", "2", "--log-dir", "logs")
    try:
        # `setsid --ctty` makes the terminal the controlling one, as a login does.
        lead = ("setsid", "--ctty", "--wait")
        one.start(*words, "script.py", stdio=(slave, slave, slave), lead=lead)
        os.close(slave)
        yield one, master
    finally:
        one.kill_all()
        with contextlib.suppress(OSError):
            os.close(master)


def kill_agent(one: Agent) -> None:
    os.kill(one.pid, signal.SIGKILL)


def kill_group(one: Agent) -> None:
    os.killpg(one.pid, signal.SIGKILL)


def kill_zygote_and_agent(one: Agent) -> None:
    os.kill(one.zygote(), signal.SIGSTOP)
    os.kill(one.pid, signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_agent, kill_group, kill_zygote_and_agent])
def test_a_killed_agent_leaves_no_process(tmp_path: Path, kill: Callable[[Agent], None]) -> None:
    options = ("--nproc-per-node", "2", "--preload", "json")
    with agent(tmp_path, *options, body=FAMILY) as one:
        family_of(one)
        until(lambda: len(one.forks_of_the_zygote()) == 2, "a store, and a process for the next")
        # The zygote's child, which has forked the last of these, may be there for a moment.
        until(lambda: len(family_of(one)) == 11, "eleven processes")
        kill(one)
        one.wait()
        one.gone()


def test_a_killed_orphan_reaper_is_replaced(tmp_path: Path) -> None:
    def reapers() -> set[int]:
        return {pid for pid in children(one.pid) if "orphan_reaper.py" in command_line(pid)}

    with agent(tmp_path, "--nproc-per-node", "2", body=FAMILY) as one:
        family_of(one)
        (first,) = reapers()
        os.kill(first, signal.SIGKILL)
        until(lambda: reapers() - {first}, "another orphan reaper runs")
        one.family()
        kill_agent(one)
        one.wait()
        one.gone()


def test_a_closed_terminal_drains_the_job_and_leaves_nothing(tmp_path: Path) -> None:
    with terminal(tmp_path, FAMILY) as (one, master):
        told = {int(word) for rank in (0, 1) for word in one.told(f"family.{rank}.0").split()}
        assert all(alive(pid) for pid in told)
        one.family()
        os.close(master)
        one.gone()
        assert [event["reason"] for event in one.events("signal")] == ["SIGHUP: draining"]
        assert one.events("agent-stopped")[-1]["data"]["exit_code"] == 143


def test_daemons_that_end_while_the_worker_runs_do_not_pile_up_as_zombies(tmp_path: Path) -> None:
    body = """
    for _ in range(20):
        if os.fork() == 0:
            if os.fork() == 0:
                os.execvp("true", ["true"])
            os._exit(0)
        os.wait()
    tell("left")
    hang()
    """

    def zombies() -> list[int]:
        return [pid for pid in children(one.pid) if state(pid) == "Z"]

    with agent(tmp_path, body=body) as one:
        one.told("left.0.0")
        until(lambda: not zombies(), "the agent reaps what it adopted")


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1, 0.2, 0.3])
def test_an_agent_killed_while_it_starts_leaves_nothing(tmp_path: Path, delay_s: float) -> None:
    body = "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '600'])\nhang()\n"
    options = ("--nproc-per-node", "4", "--preload", "json")
    with agent(tmp_path, *options, body=body) as one:
        until(lambda: children(one.pid), "the first child")
        one.family()
        with contextlib.suppress(AssertionError):
            until(lambda: False, "some time passes", delay_s)
        one.family()
        kill_agent(one)
        one.wait()
        one.gone()


def test_a_job_inside_a_worker_ends_with_the_outer_agent(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("from tell import *\ntell('inner')\nhang()\n")
    body = """
    import subprocess, sys
    words = ["--standalone", "--no-zygote", "--log-dir", "inner-logs", "inner.py"]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    subprocess.run([sys.executable, "-m", "elastane", "run", *words])
    """
    with agent(tmp_path, body=body) as one:
        one.told("inner.0.0")
        assert len(one.family()) == 6, "two agents, two orphan reapers, two workers"
        kill_agent(one)
        one.wait()
        one.gone()


def test_ctrl_c_at_the_terminal_reaches_the_agent_and_not_its_workers(tmp_path: Path) -> None:
    body = """
    def interrupted(signum, frame):
        tell("interrupted")

    def leave(signum, frame):
        tell("asked")
        raise SystemExit(0)

    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, leave)
    tell("family", os.getpid())
    hang()
    """
    with terminal(tmp_path, body) as (one, master):
        one.told("family.0.0")
        os.write(master, b"\x03")
        one.gone()
        assert one.told("asked.0.0", 0) == ""
        assert not (tmp_path / "interrupted.0.0").exists()
        assert [event["reason"] for event in one.events("signal")] == ["SIGINT: draining"]


def test_processes_that_a_successful_worker_left_behind_end_with_the_job(tmp_path: Path) -> None:
    body = f"{DAEMON}\nleave_a_daemon()\n"
    with agent(tmp_path, "--nproc-per-node", "2", body=body) as one:
        assert one.wait() == 0
        daemons = [int(one.told(f"daemon.{rank}.0")) for rank in (0, 1)]
        assert not any(alive(pid) for pid in daemons)
        one.gone()


def test_processes_that_a_failed_worker_left_behind_are_killed_before_the_next_attempt(
    tmp_path: Path,
) -> None:
    body = f"""{DAEMON}
if RESTARTS == 0:
    leave_a_daemon()
    raise SystemExit(1)
left = (FOLDER / "daemon.0.0").read_text()
tell("next", Path("/proc", left, "stat").exists())
"""
    with agent(tmp_path, "--max-restarts", "1", body=body) as one:
        assert one.wait() == 0
        assert one.told("next.0.1") == "False"
