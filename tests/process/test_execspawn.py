"""Workers as programs: waited for, signalled and reaped without a leak."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from process_harness import (
    SCRIPTS,
    command,
    ended,
    eventually,
    run_plain,
    run_spawned,
    until,
    worker_environment,
)

from elastane.errors import ConfigurationError
from elastane.process.execspawn import ExecSpawner
from elastane.process.files import process_start
from elastane.process.process import EXIT_UNKNOWN, adopt, reap_orphans

SLEEP = ("-c", "import time; time.sleep(600)")


@pytest.fixture
def spawner(runner: asyncio.Runner) -> ExecSpawner:
    one = ExecSpawner(sys.executable)
    runner.run(one.start())
    return one


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("part", ["process", "main", "streams", "interpreter", "children"])
def test_an_execed_worker_is_an_ordinary_program(
    runner: asyncio.Runner, spawner: ExecSpawner, tmp_path: Path, part: str
) -> None:
    wanted = command("script", SCRIPTS / "probe.py", env=worker_environment(PROBE=part))
    assert runner.run(run_spawned(spawner, wanted, tmp_path)) == run_plain(wanted, tmp_path)


def test_any_program_is_found_by_the_workers_path(
    runner: asyncio.Runner, spawner: ExecSpawner, tmp_path: Path
) -> None:
    program = tmp_path / "say"
    program.write_text("#!/bin/sh\necho said $1; exit 4\n")
    program.chmod(0o755)
    env = worker_environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    left = runner.run(run_spawned(spawner, command("exec", "say", "it", env=env), tmp_path))
    assert (left.code, left.out) == (4, "said it\n")


@pytest.mark.parametrize(
    ("target", "cwd", "why"),
    [("no-such-program", "/", "No such file"), ("/etc/passwd", "/", "Permission"),
     ("true", "/no/such/folder", "No such file")],
)  # fmt: skip
def test_a_program_that_cannot_run_is_reported(
    runner: asyncio.Runner, spawner: ExecSpawner, target: str, cwd: str, why: str
) -> None:
    before = descriptors()
    with pytest.raises(ConfigurationError, match=why) as caught:
        runner.run(spawner.spawn(command("exec", target, cwd=Path(cwd))))
    assert caught.value.slug == "worker-start"
    assert descriptors() <= before  # descriptors of an earlier test may have been closed


def test_signals_reach_the_worker_and_its_group_and_no_process_once_it_is_gone(
    runner: asyncio.Runner, spawner: ExecSpawner, tmp_path: Path
) -> None:
    async def scenario() -> None:
        out = os.open(tmp_path / "pids", os.O_CREAT | os.O_WRONLY)
        worker = await spawner.spawn(command("script", SCRIPTS / "family.py", stdio=(0, out, 2)))
        os.close(out)
        await eventually(lambda: (tmp_path / "pids").read_text().endswith("\n"), "family")
        away = int((tmp_path / "pids").read_text().split()[3])
        worker.send_signal(signal.SIGTERM)
        assert await ended(worker) == worker.exit_code == -signal.SIGTERM
        assert worker.group_is_alive()
        worker.send_signal(signal.SIGTERM)
        worker.kill_group(signal.SIGKILL)
        await eventually(lambda: not worker.group_is_alive(), "the group is gone")
        worker.kill_group(signal.SIGKILL)
        os.kill(away, signal.SIGKILL)
        await eventually(lambda: reap_orphans() == [away], "the one that went away is reaped")

    runner.run(scenario())


def test_a_workers_signal_handler_runs(runner: asyncio.Runner, spawner: ExecSpawner) -> None:
    async def scenario() -> None:
        code = "import signal, time; signal.signal(signal.SIGTERM, print); time.sleep(600)"
        one = await spawner.spawn(command("exec", sys.executable, "-c", code))
        two = await spawner.spawn(command("exec", sys.executable, *SLEEP))
        await eventually(lambda: one.catches(signal.SIGTERM), "the handler")
        await eventually(lambda: two.catches(signal.SIGINT), "Python's own")
        assert not two.catches(signal.SIGTERM)
        for worker in (one, two):
            worker.kill_group(signal.SIGKILL)
            assert await ended(worker) == -signal.SIGKILL
            assert not worker.catches(signal.SIGINT)

    runner.run(scenario())


def test_several_callers_may_wait_also_after_the_end(
    runner: asyncio.Runner, spawner: ExecSpawner
) -> None:
    async def scenario() -> None:
        worker = await spawner.spawn(command("exec", "sh", "-c", "exit 9"))
        first = asyncio.create_task(worker.wait())
        await asyncio.sleep(0)
        first.cancel()
        assert await asyncio.gather(*(ended(worker) for _ in range(3))) == [9, 9, 9]
        assert await ended(worker) == 9

    runner.run(scenario())


def test_a_wait_ends_even_if_another_wait_consumed_the_status(runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        assert await ended(adopt(pid, pidfd)) == EXIT_UNKNOWN

    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    pidfd = os.pidfd_open(pid)
    os.waitpid(pid, 0)
    runner.run(scenario())


def test_the_agents_own_handlers_and_mask_do_not_reach_a_worker(
    runner: asyncio.Runner, spawner: ExecSpawner, tmp_path: Path
) -> None:
    async def scenario() -> str:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            env = worker_environment(PROBE="process")
            wanted = command("script", SCRIPTS / "probe.py", env=env)
            left = await run_spawned(spawner, wanted, tmp_path)
            assert left.code == 0, left.err
            return left.out
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})

    found = runner.run(scenario())
    wanted = command("script", SCRIPTS / "probe.py", env=worker_environment(PROBE="process"))
    assert found == run_plain(wanted, tmp_path).out


def test_a_worker_dies_with_its_agent(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys\nfrom elastane.process.execspawn import launch\n"
        "async def main():\n"
        "    worker = await launch(['sleep', '600'], dict(os.environ), '/', {0: 0, 1: 1, 2: 2})\n"
        "    print(worker.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    agent = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert agent.returncode == -signal.SIGKILL
    pid = int(agent.stdout)
    # Its pipe, which `run` read to the end, is closed a moment before the process is a zombie.
    until(lambda: not process_start(pid), "the worker dies with its agent")


@pytest.mark.soak
def test_fifty_spawns_leave_nothing(runner: asyncio.Runner, spawner: ExecSpawner) -> None:
    async def scenario() -> None:
        for _ in range(50):
            assert await ended(await spawner.spawn(command("exec", "true"))) == 0

    runner.run(scenario())
    before, threads = descriptors(), {*threading.enumerate()}
    runner.run(scenario())
    # Threads of blocking calls are reused, and end once they were idle for a while.
    until(lambda: descriptors() <= before, "no more descriptors")
    until(lambda: {*threading.enumerate()} <= threads, "no more threads")
    assert reap_orphans() == []
