"""Workers that cannot reach one another, while every agent reaches its coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_jobs import wait_world
from test_hosts_in_place import in_place_on

from elastane.protocol.log_events import EventKind


def test_dead_connections_are_replaced_and_no_worker_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_place_on(tmp_path, "elastane", monkeypatch) as job:
        workers = job.pids("abc")
        job.lan.cut_off("b", "c")
        job.wait_event(EventKind.ROUND_SETTLED, "all workers wait for one another")
        job.lan.heal()
        first = wait_world(job, "abc", (1, 0))
        assert job.pids("abc") == workers, "nobody restarted"
        assert first.restarts == 0
        numbers = [s.step for s in job.seen() if s.node == "a"]
        assert numbers == sorted(set(numbers)), "no step was done twice"
