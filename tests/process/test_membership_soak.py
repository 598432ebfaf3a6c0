"""Faults in a row, from a seed: workers and agents killed, stopped and drained, also two at once.

After each, three nodes train again; no step of an old world comes after one of a newer; only
failures of workers use the budget. A failing seed replays the order of faults, not their timing.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Agent, Job, Step, newest, until

from elastane.protocol.log_events import EventKind

FAULTS = 20
NODES = ("a", "b", "c")


class Storm:
    """The faults of one job."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.random = job, random.Random(seed)
        self.live = {name: job.start(name) for name in NODES}
        self.workers_killed = 0

    def strike(self) -> str:
        """Let one fault happen, and return its name."""
        faults: list[Callable[[Agent], None]] = [
            *(self.kill_worker, self.kill_agent, self.drain, self.stand_still),
            *(self.kill_agent_and_worker, self.kill_agent_within_drain),
        ]
        fault = self.random.choice(faults)
        victim = self.live[self.random.choice(NODES)]
        if self.random.random() < 0.3:
            victim = self.job.coordinator()
        fault(victim)
        return f"{fault.__name__} {victim.name}"

    def kill_worker(self, victim: Agent) -> None:
        pids = {s.node: s.pid for s in newest(self.job.seen())}
        os.kill(pids[victim.name], signal.SIGKILL)
        self.workers_killed += 1

    def kill_agent(self, victim: Agent) -> None:
        victim.send(signal.SIGKILL)
        victim.wait()
        self.pause(2.0)
        self.replace(victim)

    def drain(self, victim: Agent) -> None:
        victim.send(signal.SIGTERM)
        assert victim.wait() == 143
        self.replace(victim)

    def stand_still(self, victim: Agent) -> None:
        victim.send(signal.SIGSTOP)
        self.pause(5.0)
        victim.send(signal.SIGCONT)

    def kill_agent_and_worker(self, victim: Agent) -> None:
        pids = {s.node: s.pid for s in newest(self.job.seen()) if s.node != victim.name}
        victim.send(signal.SIGKILL)
        self.pause(0.3)
        try:
            os.kill(self.random.choice([*pids.values()]), signal.SIGKILL)
            self.workers_killed += 1
        except ProcessLookupError:
            pass  # It was stopped for the departure already.
        victim.wait()
        self.replace(victim)

    def kill_agent_within_drain(self, victim: Agent) -> None:
        other = self.random.choice([a for a in self.live.values() if a is not victim])
        victim.send(signal.SIGTERM)
        self.pause(0.2)
        other.send(signal.SIGKILL)
        other.wait(), victim.wait()
        self.replace(victim), self.replace(other)

    def pause(self, most_s: float) -> None:
        """Let a random time pass, since faults are to come at any instant."""
        end_s = time.monotonic() + self.random.uniform(0.0, most_s)
        until(lambda: time.monotonic() >= end_s, "time passes")

    def replace(self, gone: Agent) -> None:
        self.live[gone.name] = self.job.start(gone.name)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("backend", ["elastane", "file"])
@pytest.mark.parametrize("mode", ["plain", "drain"])
def test_a_job_survives_faults_in_a_row(tmp_path: Path, backend: str, mode: str, seed: int) -> None:
    endpoint = str(tmp_path / "store") if backend == "file" else ""
    job = Job(tmp_path, "1:3", ("--max-restarts", "1000"), mode=mode)
    job.backend, job.endpoint = backend, endpoint
    with job:
        storm = Storm(job, seed)
        job.wait_step(world=3)
        for _ in range(FAULTS):
            fault = storm.strike()
            struck_s = time.time()
            job.wait(f"three nodes train after {fault}", lambda seen: all_train(seen, struck_s))  # noqa: B023
            assert all(agent.is_alive for agent in storm.live.values()), fault
        ordered = sorted(job.seen(), key=lambda s: s.time_s)
        fences = [(s.round, s.attempt) for s in ordered]
        assert fences == sorted(fences), "a world that was followed by another did a step"
        assert len(job.events(EventKind.RESTART)) <= storm.workers_killed


def all_train(seen: list[Step], after_s: float) -> bool:
    """Whether each of three ranks of the newest world has made a step after this time."""
    last = newest(seen)
    return {s.rank for s in last if s.world == 3 and s.time_s > after_s} == {0, 1, 2}
