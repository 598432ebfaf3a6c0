"""The rate at which agents look for a lost coordinator is bounded for the store."""

import asyncio

import pytest

from elastane.agent import link
from elastane.errors import MembershipError
from elastane.protocol.model import JobSpec


class Nowhere:
    async def locate(self, *, linked=False):
        raise MembershipError("no coordinator has been elected yet", slug="no-coordinator")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(2, [0.05, 0.1, 0.1, 0.1, 0.1]), (1000, [0.05, 0.1, 0.2, 0.4, 0.5])],
)
def test_agents_of_small_jobs_look_more_often_than_those_of_large_ones(
    monkeypatch, nodes, expected
):
    paused_s = []

    async def pause(seconds):
        paused_s.append(seconds)
        if len(paused_s) == len(expected):
            raise asyncio.CancelledError

    monkeypatch.setattr(link.asyncio, "sleep", pause)
    spec = JobSpec(job="j", min_nodes=1, max_nodes=nodes, max_restarts=3)
    one = link.CoordinatorLink(Nowhere(), dial=None, post=lambda event: None, spec=spec)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(one.run())
    assert paused_s == pytest.approx(expected)
