"""Failed workers restart quickly, within a budget, and with nothing of the last attempt."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from process_harness import until
from supervise import agent, alive, state


def times(events: list[dict[str, Any]]) -> list[float]:
    return [event["mono_s"] for event in events]


def test_the_shutdown_timeout_holds_on_restarts(tmp_path: Path) -> None:
    """torchrun ignores it there: one worker that traps SIGTERM costs 30 s."""
    body = """
    if RESTARTS == 0 and RANK == 0:
        trap()
        tell("up", os.getpid())
        hang()
    if RESTARTS == 0:
        wait_for("up.0.0")
        raise SystemExit(1)
    tell("again")
    """
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "1")
    with agent(tmp_path, *options, body=body) as one:
        assert one.wait() == 0
        stopping, stopped = one.events("workers-stopping")[0], one.events("workers-stopped")[0]
        took_s = stopped["mono_s"] - stopping["mono_s"]
        assert 1.0 <= took_s < 20.0
        (other,) = [e for e in one.events("worker-exited") if e["data"].get("local_rank") == 0][:1]
        assert other["data"]["exit_code"] == -signal.SIGKILL
        assert not alive(int(one.told("up.0.0")))


def test_a_worker_killed_as_by_the_kernel_is_named_with_its_signal(tmp_path: Path) -> None:
    body = """
    if RANK == 1:
        print("allocating", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    hang()
    """
    with agent(tmp_path, "--nproc-per-node", "2", body=body) as one:
        assert one.wait() == 1
        assert "SIGKILL" in one.err
        assert "dmesg" in one.err
        assert "rank 1" in one.err


def test_the_first_failure_is_the_cause_and_not_the_lowest_rank(tmp_path: Path) -> None:
    """torchrun names the lowest rank of the same second."""
    body = """
    if RANK == 2:
        wait_for("up.0.0")
        wait_for("up.1.0")
        raise SystemExit(7)
    def follow(signum, frame):
        os._exit(5)
    signal.signal(signal.SIGTERM, follow)
    tell("up")
    hang()
    """
    with agent(tmp_path, "--nproc-per-node", "3", body=body) as one:
        assert one.wait() == 1
        assert "rank 2" in one.err
        assert "exit code 7" in one.err
        codes = {e["data"]["rank"]: e["data"]["exit_code"] for e in one.events("worker-exited")}
        assert codes == {0: 5, 1: 5, 2: 7}, "the followers' ends are in the log all the same"


def test_the_error_file_explains_the_failure_wherever_its_folder_is(tmp_path: Path) -> None:
    """torch's `record` writes the file after the script has changed its folder."""
    body = """
    import json
    os.chdir("/")
    told = {"message": "short", "extraInfo": {"py_callstack": "Traceback: gradient was NaN"}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": told}))
    raise SystemExit(4)
    """
    with agent(tmp_path, body=body) as one:
        assert one.wait() == 1
        assert "gradient was NaN" in one.err
        assert "exit code 4" in one.err


def test_a_worker_that_is_done_waits_for_the_others(tmp_path: Path) -> None:
    """The exit barrier: the success of the first worker does not end the job."""
    body = """
    if RANK == 1:
        wait_for("go")
        tell("late")
    """
    with agent(tmp_path, "--nproc-per-node", "2", body=body) as one:
        until(lambda: one.events("worker-exited"), "the first is done")
        (tmp_path / "go").touch()
        assert one.wait() == 0
        assert one.told("late.1.0", 0) == ""


def test_a_failure_after_the_success_of_another_restarts_both(tmp_path: Path) -> None:
    body = """
    tell("ran")
    if RANK == 1 and RESTARTS == 0:
        wait_for("go")
        raise SystemExit(1)
    """
    with agent(tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", body=body) as one:
        until(lambda: one.events("worker-exited"), "the first is done")
        (tmp_path / "go").touch()
        assert one.wait() == 0
        assert {p.name for p in tmp_path.glob("ran.*.1")} == {"ran.0.1", "ran.1.1"}


def test_a_crash_loop_ends_with_its_reason_and_keeps_every_file(tmp_path: Path) -> None:
    body = """
    def fail_here():
        raise RuntimeError(f"attempt {RESTARTS} is bad")
    tell("ran")
    fail_here()
    """
    with agent(tmp_path, "--max-restarts", "3", "--tee", "3", body=body) as one:
        assert one.wait() == 1
        assert sorted(p.name for p in tmp_path.glob("ran.*")) == [f"ran.0.{n}" for n in range(4)]
        assert [e["data"]["used"] for e in one.events("restart")] == [1, 2, 3]
        failed, again = times(one.events("workers-stopped")), times(one.events("workers-starting"))
        pauses = [start - end for end, start in zip(failed, again[1:], strict=False)]
        assert pauses[1] >= 0.5 and pauses[2] >= 1.0, "the back-off grows"
        assert "crash loop" in one.err
        assert "RuntimeError: attempt 3 is bad" in one.err.partition("crash loop")[2]
        assert "fail_here" in one.err.partition("crash loop")[2]
        for attempt in range(4):
            log = one.job_dir() / f"round_1/attempt_{attempt}/rank_0/stderr.log"
            assert f"attempt {attempt} is bad" in log.read_text()


def test_a_stopped_worker_keeps_its_place(tmp_path: Path) -> None:
    """Without steps no worker counts as hanging, since a debugger may stop it for any time."""
    body = 'tell("up", os.getpid())\nwait_for("go")\n'
    with agent(tmp_path, body=body) as one:
        pid = int(one.told("up.0.0"))
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        heartbeat_s = one.events()[-1]["mono_s"]
        until(lambda: time.monotonic() > heartbeat_s + 4, "longer than any bound of silence")
        assert alive(pid)
        os.kill(pid, signal.SIGCONT)
        assert one.wait() == 0
        assert len(one.events("workers-starting")) == 1


def test_workers_outlive_their_zygote_and_the_next_attempt_starts(tmp_path: Path) -> None:
    body = """
    tell("up", os.getpid())
    if RESTARTS == 0:
        hang()
    """
    with agent(tmp_path, "--preload", "json", "--max-restarts", "1", body=body) as one:
        worker = int(one.told("up.0.0"))
        zygote = one.zygote()
        os.kill(zygote, signal.SIGKILL)
        until(lambda: one.events("zygote-died"), "the agent noticed")
        assert alive(worker)
        os.kill(worker, signal.SIGKILL)
        assert one.wait() == 0
        one.gone()


def test_an_agent_that_was_blocked_restarts_nothing(tmp_path: Path) -> None:
    """A suspended or migrated machine is silent for longer than any bound."""
    body = 'tell("up", os.getpid())\nwait_for("go")\n'
    with agent(tmp_path, "--rdzv-conf", "heartbeat=0.2,silence=0.5", body=body) as one:
        worker = int(one.told("up.0.0"))
        one.send(signal.SIGSTOP)
        until(lambda: state(one.pid) == "T", "the agent stands still")
        end_s = time.monotonic() + 1.5
        until(lambda: time.monotonic() > end_s, "three times the bound")
        one.send(signal.SIGCONT)
        end_s = time.monotonic() + 1.0
        until(lambda: time.monotonic() > end_s, "it had time to err")
        assert alive(worker)
        (tmp_path / "go").touch()
        assert one.wait() == 0
        assert len(one.events("workers-starting")) == 1


@pytest.mark.parametrize("options", [("--no-zygote",), ("--preload", "json")], ids=["exec", "fork"])
def test_restarts_leak_neither_descriptors_nor_threads_and_the_agent_stays_small(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    body = """
    tell("up", os.getpid())
    wait_for(f"fail.{RESTARTS}")
    raise SystemExit(1)
    """
    restarts, stores = 12, 0 if "--no-zygote" in options else 2

    def sizes(restart: int) -> tuple[int, int, int]:
        for rank in (0, 1):
            one.told(f"up.{rank}.{restart}")
        until(lambda: len(one.events("workers-started")) > restart, "the start is over")
        until(lambda: len(one.forks_of_the_zygote()) == stores, "the process of the next store")
        status = Path(f"/proc/{one.pid}/status").read_text()
        (rss_kb,) = [int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line]
        (threads,) = [int(line.split()[1]) for line in status.splitlines() if "Threads" in line]
        return len(os.listdir(f"/proc/{one.pid}/fd")), threads, rss_kb

    more = ("--nproc-per-node", "2", "--max-restarts", str(restarts), "--tee", "3")
    with agent(tmp_path, *options, *more, "--rdzv-conf", "crash_loop=0", body=body) as one:
        first = sizes(0)
        for restart in range(restarts):
            (tmp_path / f"fail.{restart}").touch()
        last = sizes(restarts)
        assert last[0] <= first[0]
        assert last[1] <= first[1] + 2, "each of the two workers' last words had a thread"
        assert last[2] < 40 << 10, "40 MB"
