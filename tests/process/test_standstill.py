"""The workers of a suspended agent are dead before another world may train."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from jobs import Job, newest, runs, until
from supervise import state

from elastane.protocol.log_events import EventKind

SHORT = str(Path(__file__).parent / "scripts" / "short_isolation.py")


def test_an_agent_that_is_stopped_alone_does_not_leave_two_worlds_training(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with Job(
        tmp_path,
        nnodes="1:1",
        options=("--max-restarts", "0", "--rdzv-conf", "isolation_limit=4"),
        backend="file",
        endpoint=store,
        mode="alone",
        program=(SHORT,),
    ) as job:
        first = job.start("a")
        old = job.wait_step(world=1)
        second = job.start("b")
        job.wait_event(EventKind.NODE_JOINED, "b")
        os.kill(first.process.pid, signal.SIGSTOP)
        try:
            until(lambda: not runs(old.pid), "the worker of the stopped agent is dead")
            assert state(first.process.pid) == "T"
            job.wait("another world trains", lambda seen: newest(seen)[0].node == "b")
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        assert "[agent-standstill]" in first.words
        # It returns as an idle node, and its killed workers used no restart.
        kinds = EventKind.NODE_JOINED, EventKind.NODE_REGISTERED_AGAIN
        until(
            lambda: {(e.node, e.pid) for e in job.events(*kinds)} >= {("a", second.process.pid)},
            "the coordinator that took over has the first agent",
        )
        steps = job.seen()
        assert {(s.node, s.restarts) for s in steps} == {("a", 0), ("b", 0)}
        last, begun = [s for s in steps if s.node == "a"][-1], newest(steps)[0]
        assert last.time_s < begun.time_s
