"""After any end of an agent all its processes are gone, and no other process is touched."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_harness import SCRIPTS, eventually, until
from supervise import alive, state

from elastane.process.kernel import become_subreaper
from elastane.process.orphan_reaper import LOOK_S, OrphanReaper, sweep
from elastane.protocol.limits import STANDSTILL_LOOK_S


def pids(path: Path) -> list[int]:
    text = path.read_text() if path.exists() else ""
    return [int(word) for word in text.split()] if text.endswith("\n") else []


def alive_of(found: set[int]) -> set[int]:
    return {pid for pid in found if alive(pid)}


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def unrelated() -> Iterator[subprocess.Popen[bytes]]:
    """A process with another mark that begins with the same characters."""
    with subprocess.Popen(["sleep", "600"], env={"ELASTANE_PROCESS_MARK": "other"}) as process:
        yield process
        process.kill()


def start_agent(mark: str, folder: Path, *options: str) -> tuple[subprocess.Popen[bytes], set[int]]:
    agent = subprocess.Popen(
        [sys.executable, SCRIPTS / "fake_agent.py", mark, folder, *options], cwd=folder
    )
    names = ("agent", "forked", "execed")
    until(lambda: all(pids(folder / name) for name in names), "the whole family runs")
    found = {pid for name in names for pid in pids(folder / name)}
    assert len(found) == 11
    return agent, found


def test_sigkill_of_the_agent_leaves_nothing(
    mark: str, tmp_path: Path, unrelated: subprocess.Popen[bytes]
) -> None:
    agent, family = start_agent(mark, tmp_path, "--torch")
    assert all(alive(pid) for pid in family)
    agent.kill()
    agent.wait()
    until(lambda: not any(alive(pid) for pid in family), "all are gone, the orphan reaper too")
    assert alive(unrelated.pid)


def test_a_stopped_zygote_and_a_stopped_worker_do_not_survive_either(
    mark: str, tmp_path: Path
) -> None:
    agent, family = start_agent(mark, tmp_path)
    for pid in (pids(tmp_path / "agent")[1], pids(tmp_path / "forked")[0]):
        os.kill(pid, signal.SIGSTOP)
    agent.kill()
    agent.wait()
    until(lambda: not any(alive(pid) for pid in family), "all are gone")


def test_the_workers_of_a_blocked_agent_are_killed_at_the_deadline(
    mark: str, tmp_path: Path, unrelated: subprocess.Popen[bytes]
) -> None:
    server = subprocess.Popen(["sleep", "600"], env={"ELASTANE_SERVER_MARK": mark})
    agent, family = start_agent(mark, tmp_path, "--deadline")
    reaper = pids(tmp_path / "agent")[2]
    os.kill(agent.pid, signal.SIGSTOP)
    until(lambda: alive_of(family) == {agent.pid, reaper}, "only agent and orphan reaper are left")
    assert state(agent.pid) == "T" and alive(unrelated.pid) and alive(server.pid)
    agent.kill()
    agent.wait()
    until(lambda: server.poll() is not None, "the agent's server ends with the agent")


def test_a_second_orphan_reaper_keeps_the_deadline_of_the_first(mark: str) -> None:
    async def scenario() -> None:
        reaper = OrphanReaper(mark)
        await reaper.start()
        assert reaper.pid is not None
        os.kill(reaper.pid, signal.SIGKILL)
        await reaper.wait()
        reaper.allow_until(1)
        await reaper.start()
        await eventually(lambda: worker.poll() is not None, "the worker is killed")
        await reaper.close()

    with subprocess.Popen(["sleep", "600"], env={"ELASTANE_PROCESS_MARK": mark}) as worker:
        asyncio.run(scenario())


def test_the_orphan_reaper_checks_as_often_as_the_bounds_say() -> None:
    assert LOOK_S == STANDSTILL_LOOK_S


def test_an_orderly_end_leaves_nothing(mark: str, tmp_path: Path) -> None:
    agent, family = start_agent(mark, tmp_path, "--close")
    assert agent.wait(timeout=90) == 0
    assert not any(alive(pid) for pid in family)


def test_the_orphan_reaper_ignores_polite_signals_and_can_be_started_again(
    mark: str,
) -> None:
    async def scenario() -> None:
        reaper = OrphanReaper(mark)
        await reaper.start()
        first = reaper.pid
        assert first is not None
        await eventually(
            lambda: b"orphan_reaper" in Path(f"/proc/{first}/cmdline").read_bytes(), "exec"
        )
        os.kill(first, signal.SIGKILL)
        assert await reaper.wait() == -signal.SIGKILL
        assert reaper.pid is None
        await reaper.start()
        assert reaper.pid is not None
        await reaper.close()
        assert reaper.pid is None

    asyncio.run(scenario())


def test_sweep_finds_a_grandchild_that_took_its_own_session(mark: str, tmp_path: Path) -> None:
    become_subreaper()
    with (tmp_path / "pids").open("w") as out:
        worker = subprocess.Popen(
            [sys.executable, SCRIPTS / "family.py", "--leave"],
            env=dict(os.environ, ELASTANE_PROCESS_MARK=mark),
            stdout=out,
        )
    assert worker.wait(timeout=90) == 0
    left = pids(tmp_path / "pids")[1:]
    assert all(alive(pid) for pid in left)
    spared = left[0]
    assert sorted(sweep(mark, excluded=(spared,))) == sorted(left[1:])
    assert alive(spared)
    until(lambda: not any(alive(pid) for pid in left[1:]), "what was swept is gone")
    assert sweep(mark) == [spared]
    until(lambda: not any(alive(pid) for pid in left), "gone")
    for pid in left:
        os.waitpid(pid, 0)


def test_sweep_takes_only_the_whole_marker(mark: str) -> None:
    for env in (
        {"ELASTANE_PROCESS_MARK": mark + "0"},
        {"XELASTANE_PROCESS_MARK": mark},
        {"A": mark},
    ):
        with subprocess.Popen(["sleep", "600"], env=env) as process:
            assert sweep(mark) == []
            assert alive(process.pid)
            process.kill()
