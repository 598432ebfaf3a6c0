"""Arriving nodes are gathered into one change, and survivors keep their ranks."""

from __future__ import annotations

import signal
from pathlib import Path

from jobs import Job, newest, ranks

from elastane.protocol.log_events import EventKind


def test_arrivals_are_gathered_survivors_keep_their_ranks_and_a_spare_is_promoted(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, nnodes="1:4", mode="alone", conf="last_call=0.5") as job:
        job.start("c")
        job.wait_step(world=1)
        job.start("b"), job.start("a")
        three = job.wait_step(world=3)
        assert (three.round, three.restarts) == (2, 0), "two arrivals are one change"
        assert ranks(newest(job.seen()))[0] == "c", "the survivor keeps its rank"
        job.start("d")
        job.wait_step(world=4)
        before = ranks(newest(job.seen()))
        assert before[3] == "d", "an arrival comes last"
        job.start("spare")
        job.wait_event(EventKind.NODE_JOINED, "spare")
        job.wait_step(world=4, count=75)
        assert len(job.events(EventKind.ROUND_SETTLED)) == 3, "a spare disturbs nobody"
        next(a for a in job.agents if a.name == before[1]).send(signal.SIGKILL)
        job.wait_step(world=4, fence=(3, 0))
        after = ranks(newest(job.seen()))
        assert after == {0: "c", 1: before[2], 2: "d", 3: "spare"}, "survivors in their order"


def test_an_arrival_loses_no_step_and_redoes_none(tmp_path: Path) -> None:
    with Job(tmp_path, nnodes="1:2", mode="drain", conf="last_call=0.5") as job:
        job.start("a")
        job.wait_step(world=1, count=13)
        job.start("b")
        job.wait_step(world=2)
        done = [s.step for s in job.seen() if s.rank == 0]
        assert done == list(range(1, len(done) + 1))
        assert not job.events(EventKind.RESTART)
