"""Hosts are cut off or lose power, and the workers of the others recover in place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import host_jobs
import pytest
from host_jobs import HostJob, job_on, let_pass, wait_world
from hosts import clock, need_faketime
from jobs import SCRIPT, Step, newest

from elastane.protocol.log_events import EventKind

IN_PLACE = SCRIPT.with_name("member_in_place.py")


@dataclass
class InPlaceJob(HostJob):
    """A job whose script recovers in place."""

    def command(self, node: str, nproc: int, options: tuple[str, ...]) -> list[str]:
        words = super().command(node, nproc, options)
        return [str(IN_PLACE) if word == str(SCRIPT) else word for word in words]

    def check_order(self, seen: list[Step]) -> None:
        """Check that each step was committed in one world, in the order of the worlds.

        A host that is cut off while it commits a step learns that all members made it once the
        network is back. Its line then stands after those of the next world, which begins with the
        same step already made.
        """
        worlds: dict[tuple[int, int], set[int]] = {}
        for step in seen:
            worlds.setdefault((step.round, step.attempt), set()).add(step.step)
        for (old, before), (new, after) in pairwise(sorted(worlds.items())):
            assert max(before) < min(after), f"{new} repeats steps of {old}: {before & after}"
        for pid in {(step.node, step.pid) for step in seen}:
            fences = [(s.round, s.attempt) for s in seen if (s.node, s.pid) == pid]
            assert fences == sorted(fences), f"worker {pid} went back to an older world: {fences}"

    def pids(self, nodes: str) -> set[tuple[str, int]]:
        """Return the newest world's workers on these nodes."""
        return {(step.node, step.pid) for step in newest(self.seen()) if step.node in nodes}


@contextmanager
def in_place_on(
    folder: Path, backend: str, patch: pytest.MonkeyPatch, shifts: tuple[str, ...] = ()
) -> Iterator[InPlaceJob]:
    """Yield three hosts that train together, with the coordinator and rank 0 on `a`.

    `shifts`: by how much the clocks of the three hosts are off.
    """
    clocks = {name: clock(shift) for name, shift in zip("abc", shifts, strict=False)}
    patch.setattr(host_jobs, "HostJob", InPlaceJob)
    with job_on(folder, "abc", backend=backend, options=("--min-workers", "2")) as job:
        job.start("a", env=clocks.get("a"))
        job.wait_event(EventKind.COORDINATOR_STARTED)
        job.start("b", env=clocks.get("b")), job.start("c", env=clocks.get("c"))
        wait_world(job, "abc")
        assert job.coordinator().name == "a"
        assert newest(job.seen())[0].world == 3
        yield job


def test_after_a_cut_the_others_recover_in_place_and_the_host_returns_as_an_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_place_on(tmp_path, "elastane", monkeypatch) as job:
        survivors, cut = job.pids("ac"), job.pids("b")
        job.lan.cut_off("b")
        first = wait_world(job, "ac", (1, 0))
        assert job.pids("ac") == survivors, "nobody restarted"
        let_pass(1.0)
        late = [s for s in job.seen() if s.node == "b" and s.step >= first.step]
        assert not late, "the one that is cut off trains on"
        job.lan.heal()
        wait_world(job, "abc", (first.round, first.attempt))
        assert job.pids("ac") == survivors, "an arrival restarts nobody"
        assert not job.pids("b") & cut, "it came back as an arrival"
        assert job.wait_event(EventKind.DRAIN_STARTED, "adding workers of b")
        numbers = [s.step for s in job.seen() if s.node == "a"]
        assert numbers == sorted(set(numbers)), "no step was done twice"


@pytest.mark.soak
def test_clocks_an_hour_apart_change_nothing_in_a_recovery_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_faketime()
    with in_place_on(tmp_path, "elastane", monkeypatch, ("-1h", "+1h", "+0")) as job:
        survivors = job.pids("ac")
        job.lan.cut_off("b")
        began_s = time.monotonic()
        first = wait_world(job, "ac", (1, 0))
        assert time.monotonic() - began_s < 15.0
        assert job.pids("ac") == survivors, "nobody restarted"
        job.lan.heal()
        wait_world(job, "abc", (first.round, first.attempt))
        assert job.pids("ac") == survivors, "an arrival restarts nobody"


def test_after_a_power_loss_of_rank_0_and_coordinator_the_others_recover_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_place_on(tmp_path, "file", monkeypatch) as job:
        rank_0 = next(s.node for s in newest(job.seen()) if s.rank == 0)
        assert rank_0 == "a"
        survivors, last = job.pids("bc"), max(s.step for s in job.seen())
        job.lan.kill("a")
        first = wait_world(job, "bc", (1, 0))
        assert job.pids("bc") == survivors, "nobody restarted"
        assert first.step <= last + 2 and first.restarts == 0
        assert job.coordinator().name in "bc"


@pytest.mark.soak
def test_after_a_cut_of_the_coordinator_from_all_agents_the_others_recover_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_place_on(tmp_path, "file", monkeypatch) as job:
        last = max(s.step for s in job.seen())
        survivor = job.pids("a")
        job.lan.cut_off("a")
        first = wait_world(job, "bc", (1, 0))
        assert first.step <= last + 2 and first.restarts == 0
        assert job.coordinator().name in "bc"
        let_pass(1.0)
        assert not [s for s in job.seen() if s.node == "a" and s.step >= first.step]
        job.lan.heal()
        wait_world(job, "abc", (first.round, first.attempt))
        assert not job.pids("a") & survivor, "it came back as an arrival"
