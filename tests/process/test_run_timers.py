"""The agent watches timers that workers set, uninterruptible sleep, and its own health."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from ports import free_port
from process_harness import until
from supervise import agent, alive

from elastane.process.timers import WorkerTimer

pytest.importorskip("torch")

EXPIRE = """
import torch.distributed.elastic.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60, scope="in time"):
    pass
if RESTARTS == 0 and RANK == 1:
    with timer.expires(after=0.3, scope="a step"):
        hang()
tell("done")
"""


def test_only_the_worker_with_an_expired_timer_is_ended_and_its_scope_is_named(
    tmp_path: Path,
) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    with agent(tmp_path, *options, body=EXPIRE, **env) as one:
        assert one.wait(60) == 0, "the agent lives on, unlike torchrun's, and starts them again"
        one.told("done.0.1")
        one.told("done.1.1")
        (ended,) = [e for e in one.events("worker-exited") if e["data"].get("exit_code") == -9]
        assert ended["data"]["rank"] == 1
        one.gone()


@pytest.mark.soak
def test_the_message_of_the_failure_names_scope_and_deadline(tmp_path: Path) -> None:
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(tmp_path / "pipe")}
    with agent(tmp_path, "--nproc-per-node", "2", body=EXPIRE, **env) as one:
        assert one.wait(60) == 1
        box = " ".join(one.err.partition("╔")[2].replace("║", " ").split())
        assert "timer 'a step'" in box
        assert "[timer-expired]" in box
        assert not (tmp_path / "pipe").exists()


def test_a_timer_of_a_foreign_process_ends_no_worker(tmp_path: Path) -> None:
    body = """
    tell("file", os.environ["TORCHELASTIC_TIMER_FILE"])
    wait_for("sent")
    """
    with agent(tmp_path, body=body, TORCHELASTIC_ENABLE_FILE_TIMER="1") as one:
        path = one.told("file.0.0")
        mine = os.getpid()
        request = WorkerTimer(mine, "mine", time.time(), 9)
        with open(path, "wb", buffering=0) as pipe:
            pipe.write(b"no timer at all\n")
            fields = {name: getattr(request, name) for name in request.__struct_fields__}
            pipe.write(json.dumps(fields).encode() + b"\n")
        until(lambda: "no worker here owns that process" in one.err, "the agent says so")
        assert "is not a timer" in one.err
        (tmp_path / "sent").touch()
        assert one.wait() == 0


def test_a_timer_of_a_workers_child_ends_the_child(tmp_path: Path) -> None:
    body = """
    import json
    child = os.fork()
    if child == 0:
        line = {"pid": os.getpid(), "scope_id": "of a child", "expiration_time": 1, "signal": 9}
        with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as pipe:
            pipe.write(json.dumps(line) + "\\n")
        hang()
    tell("status", os.waitpid(child, 0)[1])
    """
    with agent(tmp_path, body=body, TORCHELASTIC_ENABLE_FILE_TIMER="1") as one:
        assert one.wait() == 0
        assert one.told("status.0.0") == "9"


STUCK = """
import sys
if RESTARTS == 0:
    # The parent of a vfork sleeps uninterruptibly until its child has execed; this child waits for
    # a writer that never comes.
    os.mkfifo(FOLDER / "never")
    tell("stuck", os.getpid())
    opening = [(os.POSIX_SPAWN_OPEN, 0, str(FOLDER / "never"), os.O_RDONLY, 0)]
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=opening)
"""


def test_a_worker_in_uninterruptible_sleep_is_a_failure_after_the_time_that_is_set(
    tmp_path: Path,
) -> None:
    env = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0.5"}
    options = ("--max-restarts", "1", "--shutdown-timeout", "0.1")
    with agent(tmp_path, *options, body=STUCK, **env) as one:
        pid = int(one.told("stuck.0.0"))
        assert one.wait(60) == 0
        assert not alive(pid)
        (ended,) = [e for e in one.events("worker-exited") if e["data"].get("exit_code") == 255]
        assert ended["data"]["pid"] == pid
        one.gone()


def test_a_worker_in_uninterruptible_sleep_is_awaited_without_a_limit(tmp_path: Path) -> None:
    with agent(tmp_path, "--shutdown-timeout", "0.1", body=STUCK) as one:
        one.told("stuck.0.0")
        began_s = time.monotonic()
        until(lambda: time.monotonic() - began_s > 1.5, "three times the bound of the other test")
        assert not one.events("worker-exited")
        one.send(15)
        one.wait(60)


def test_the_agent_answers_health_checks(tmp_path: Path) -> None:
    port = free_port()
    body = "tell('up')\nwait_for('asked')"
    with agent(tmp_path, body=body, TORCHELASTIC_HEALTH_CHECK_PORT=str(port)) as one:
        one.told("up.0.0")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30) as answer:
            assert answer.status == 200
            assert json.load(answer)["alive"] is True
        (tmp_path / "asked").touch()
        assert one.wait() == 0


def test_a_taken_health_port_does_not_fail_the_job(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with agent(tmp_path, body="pass", TORCHELASTIC_HEALTH_CHECK_PORT=port) as one:
            assert one.wait() == 0
            assert f"no answers to health checks on port {port}" in one.err
