"""Hosts with a wrong clock or full disks, and agents that restart all the time."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from host_jobs import HostJob, job_on, judge, let_pass, wait_world
from hosts import Host, Lan, clock, need_faketime, need_hosts
from jobs import newest, until

from elastane.protocol.log_events import EventKind


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["elastane", pytest.param("file", marks=pytest.mark.soak)])
def test_clocks_an_hour_apart_change_no_decision_and_the_first_failure_is_still_the_cause(
    tmp_path: Path, backend: str
) -> None:
    need_faketime()
    shifts = {"a": "-1h", "b": "+1h", "c": "+0"}
    options = ("--max-restarts", "1")
    with job_on(tmp_path, "abc", backend=backend, options=options) as job:
        job.start("a", env=clock(shifts["a"]))
        job.wait_event(EventKind.COORDINATOR_STARTED)
        job.start("b", env=clock(shifts["b"])), job.start("c")
        wait_world(job, "abc")
        apart_s = {s.node: s.time_s - time.time() for s in newest(job.seen())[-3:]}
        assert abs(apart_s["b"] - apart_s["a"] - 7200) < 60, "the clocks do differ"
        victim = next(s for s in newest(job.seen()) if s.node == "b")
        job.lan["b"].ask("signal", pid=victim.pid, number=int(signal.SIGKILL))
        again = wait_world(job, "abc", (1, 0))
        assert (again.round, again.attempt, again.restarts) == (1, 1, 1)
        restart = job.events(EventKind.RESTART)[0]
        assert restart.data["cause_node"] == "b" and "SIGKILL" in str(restart.data["cause"])
        leaves = "b" if backend == "elastane" else "a"
        job.lan.kill(leaves)
        killed_s = time.monotonic()
        first = wait_world(job, "abc".replace(leaves, ""), (1, 1))
        assert time.monotonic() - killed_s < 15.0
        assert first.round == 2


def fill(folder: Path, host: Host) -> None:
    """Fill the file system of a folder of the host."""
    done = host.run("sh", "-c", f"cat /dev/zero >{folder}/filler 2>/dev/null || true; df {folder}")
    assert "100%" in done, done


def test_a_full_disk_under_logs_and_events_stops_no_training_and_losses_are_logged(
    tmp_path: Path,
) -> None:
    logs = tmp_path / "small"
    with job_on(tmp_path, "ab", nnodes="2", options=("--max-restarts", "3")) as job:
        job.lan["b"].small_disk(logs, "512k")
        small = ("--log-dir", str(logs), "--redirects", "3")
        job.start("a")
        job.start("b", *small)
        wait_world(job, "ab")
        fill(logs, job.lan["b"])
        victim = newest(job.seen())[-1]
        for attempt in (1, 2):
            job.lan[victim.node].ask("signal", pid=victim.pid, number=int(signal.SIGKILL))
            victim = wait_world(job, "ab", (1, attempt - 1))
            assert (victim.round, victim.attempt) == (1, attempt), "workers start on a full disk"
        job.lan["b"].run("rm", str(logs / "filler"))
        job.lan[victim.node].ask("signal", pid=victim.pid, number=int(signal.SIGKILL))
        wait_world(job, "ab", (1, 2))

        def told() -> str:
            return job.lan["b"].run("sh", "-c", f"cat $(find {logs} -name '*event*' -type f)")

        until(lambda: f'"{EventKind.EVENTS_LOST}"' in told(), "the log tells that it lost events")


@pytest.mark.soak
def test_a_job_starts_where_the_disk_for_logs_was_full_before(tmp_path: Path) -> None:
    logs = tmp_path / "small"
    with job_on(tmp_path, "ab", nnodes="2", steps=20) as job:
        job.lan["b"].small_disk(logs, "64k")
        fill(logs, job.lan["b"])
        job.start("a"), job.start("b", "--log-dir", str(logs))
        assert [agent.wait() for agent in job.agents] == [0, 0], job.story()


@pytest.mark.parametrize("full_s", [2.0, pytest.param(25.0, marks=pytest.mark.soak)])
def test_a_full_disk_under_the_store_stops_no_training_and_decisions_wait_for_room(
    tmp_path: Path, full_s: float
) -> None:
    need_hosts()
    store = tmp_path / "store"
    options = ("--max-restarts", "1")
    with (
        Lan("a") as lan,
        HostJob(tmp_path, "2", options, backend="file", endpoint=str(store), lan=lan) as job,
    ):
        lan["a"].small_disk(store, "256k")
        lan["a"].run("chmod", "700", str(store))
        job.start("x", host="a"), job.start("y", host="a")
        job.wait_step(world=2)
        fill(store, lan["a"])
        job.wait_step(world=2, count=len(newest(job.seen())) // 2 + 75)
        victim = newest(job.seen())[-1]
        lan["a"].ask("signal", pid=victim.pid, number=int(signal.SIGKILL))
        job.wait_event(EventKind.WORKERS_STOPPED, count=2)
        let_pass(full_s)
        assert {(s.round, s.attempt) for s in job.seen()} == {(1, 0)}, "nothing is decided"
        lan["a"].run("rm", str(store / "filler"))
        again = job.wait_step(world=2, fence=(1, 0))
        assert again.round == 1 and again.restarts <= 1
        judge(job)


def open_files(host: Host, pid: int) -> int:
    return int(host.run("sh", "-c", f"ls /proc/{pid}/fd | wc -l"))


def resident_kb(host: Host, pid: int) -> int:
    return int(host.run("sh", "-c", f"awk '/VmRSS/ {{print $2}}' /proc/{pid}/status"))


def restart_in_a_row(folder: Path, count: int) -> None:
    """Restart one node's agent repeatedly, in turn after SIGKILL, SIGTERM and loss of power."""
    conf = "last_call=0.1,gather=0.1"
    with job_on(folder, "ab", nnodes="1:2", mode="alone", conf=conf) as job:
        job.start("a")
        agent = job.start("b")
        fence = wait_world(job, "ab")
        anchor = job.agents[0].process.pid
        after_two: tuple[int, int] = (0, 0)
        for turn in range(count):
            if turn == 2:
                after_two = (open_files(job.lan["a"], anchor), resident_kb(job.lan["a"], anchor))
            if turn % 10 == 9:
                job.lan.kill("b")
                job.lan.add("b")
            else:
                agent.send(signal.SIGKILL if turn % 2 else signal.SIGTERM)
                agent.wait()
            agent = job.start("b")
            fence = wait_world(job, "ab", (fence.round, fence.attempt))
        assert fence.restarts == 0
        assert len(job.events(EventKind.AGENT_STARTED)) == count + 2
        assert open_files(job.lan["a"], anchor) <= after_two[0] + 3
        assert resident_kb(job.lan["a"], anchor) <= after_two[1] + 2000 + 20 * count
        left = job.lan["b"].run("sh", "-c", "ls -d /proc/[0-9]* | wc -l")
        assert int(left) < 15, "processes of agents that ended are left"


@pytest.mark.soak
def test_20_restarts_of_an_agent_in_a_row_leave_nothing_behind(tmp_path: Path) -> None:
    restart_in_a_row(tmp_path, 20)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_200_restarts_of_an_agent_in_a_row_leave_nothing_behind(tmp_path: Path) -> None:
    restart_in_a_row(tmp_path, 200)
