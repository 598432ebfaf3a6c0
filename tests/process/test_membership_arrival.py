"""Nodes that arrive: gathered, in one change, beside survivors that keep their ranks."""

from __future__ import annotations

import signal
from pathlib import Path

from jobs import Job, newest, ranks

from elastane.core.notes import EventKind


def test_arrivals_are_gathered_survivors_keep_their_ranks_and_a_spare_is_promoted(
    tmp_path: Path,
) -> None:
    with Job(
        tmp_path, nnodes="1:3", mode="alone", conf="last_call=0.5,gather=4,gather_max=8"
    ) as job:
        job.start("c")
        job.wait_step(world=1)
        job.start("a"), job.start("b")
        three = job.wait_step(world=3, fence=(1, 0))
        assert (three.round, three.restarts) == (2, 0), "two arrivals are one change"
        places = ranks(newest(job.seen()))
        assert places[0] == "c", "the survivor keeps its rank, whatever it is called"
        assert set(places.values()) == {"a", "b", "c"}
        spare = job.start("d")
        job.wait_event(EventKind.NODE_JOINED, "d")
        job.wait_step(world=3, count=newest(job.seen())[-1].step + 10)
        assert len(job.events(EventKind.ROUND_SETTLED)) == 2, "a spare disturbs nobody"
        leaver = next(a for a in job.agents if a.name == places[1])
        leaver.send(signal.SIGKILL)
        job.wait_step(world=3, fence=(2, 0))
        after = ranks(newest(job.seen()))
        assert set(after.values()) == {"c", places[2], "d"}
        assert after[0] == "c" and spare.is_alive
        assert [n for n in after.values() if n != "d"] == ["c", places[2]], "in their order"


def test_an_arrival_loses_no_step_and_redoes_none(tmp_path: Path) -> None:
    with Job(tmp_path, nnodes="1:2", mode="drain", conf="last_call=0.5") as job:
        job.start("a")
        job.wait_step(world=1, count=13)
        job.start("b")
        job.wait_step(world=2)
        done = [s.step for s in job.seen() if s.rank == 0]
        assert done == list(range(1, len(done) + 1))
        assert not job.events(EventKind.RESTART)
