"""A job is followed by its log and its coordinator, and closing leaves no query open."""

import asyncio
import json

import pytest
from reports import report_of
from view_events import event, settled, started

from elastane.dashboard import following
from elastane.dashboard.following import FollowedJob, JobFollower
from elastane.observe.events import encode_line
from elastane.process.files import JobEntry

DEADLINE_S = 30.0


class Coordinator:
    """A coordinator that delays each answer until the test releases it."""

    def __init__(self, monkeypatch):
        self.asked, self.answer = asyncio.Event(), asyncio.Event()
        self.ends = []
        monkeypatch.setattr(following, "query", self.query)

    async def query(self, *_):
        self.asked.set()
        try:
            await self.answer.wait()
        except asyncio.CancelledError:
            self.ends.append("cut off")
            raise
        self.ends.append("answered")
        return report_of("j")


@pytest.fixture
def folder(tmp_path):
    story = [settled(1, "a", 2), started("a", 1, 2, round=1, attempt=0)]
    (tmp_path / "events.h.jsonl").write_bytes(b"".join(encode_line(one) for one in story))
    return tmp_path


def agents(_):
    return [JobEntry(job="j", node="a", endpoint="127.0.0.1:1", token="", pid=1, process="p")]


def followed(folder, find_agents=agents):
    job = JobFollower("j", folder, find_agents, None)
    job.watchers = 1
    return job


def test_closing_waits_for_the_answer_to_a_question_that_runs(folder, monkeypatch):
    async def play():
        coordinator = Coordinator(monkeypatch)
        job = followed(folder)
        await coordinator.asked.wait()
        closing = asyncio.create_task(job.close())
        await asyncio.wait([closing], timeout=0.1)
        assert not closing.done(), "it waits"
        coordinator.answer.set()
        await closing
        return coordinator.ends

    assert asyncio.run(asyncio.wait_for(play(), DEADLINE_S)) == ["answered"]


def test_closing_cuts_off_a_question_that_is_not_answered(folder, monkeypatch):
    monkeypatch.setattr(following, "CLOSE_S", 0.05)

    async def play():
        before = asyncio.all_tasks()
        coordinator = Coordinator(monkeypatch)
        job = followed(folder)
        await coordinator.asked.wait()
        await job.close()
        assert asyncio.all_tasks() == before, "no task is left"
        return coordinator.ends

    assert asyncio.run(asyncio.wait_for(play(), DEADLINE_S)) == ["cut off"]


def test_a_job_is_ready_once_its_log_is_read_and_its_coordinator_asked(folder, monkeypatch):
    async def play():
        coordinator = Coordinator(monkeypatch)
        job = followed(folder)
        ready = asyncio.create_task(job.ready())
        await coordinator.asked.wait()
        assert not ready.done()
        coordinator.answer.set()
        await ready
        shown = job.sections()
        await job.close()
        return shown

    shown = asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
    assert shown.job.is_read and shown.job.is_live and shown.job.world_size == 2
    assert shown.job.events == 2 and shown.account.causes


def test_a_job_without_an_agent_here_is_ready_without_a_question(folder, monkeypatch):
    async def play():
        coordinator = Coordinator(monkeypatch)
        job = followed(folder, lambda _: [])
        await job.ready()
        shown = job.sections()
        await job.close()
        return coordinator.asked.is_set(), shown

    asked, shown = asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
    assert not asked and not shown.job.is_live


def test_an_error_that_ends_the_follower_is_raised(folder):
    def broken(_):
        raise PermissionError("the runtime folder")

    async def play():
        job = followed(folder, broken)
        await asyncio.wait(job._tasks, return_when=asyncio.FIRST_COMPLETED)
        try:
            job.check()
        finally:
            await job.close()

    with pytest.raises(PermissionError, match="runtime folder"):
        asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


def test_another_run_under_the_same_name_is_counted_and_accounted_by_itself(folder):
    more = [
        event("job-ended", "a", ok=True, time_s=120.0),
        event("coordinator-started", "a", time_s=500.0),
        event("waiting", "a", time_s=510.0, min_nodes=2),
    ]
    with (folder / "events.h.jsonl").open("ab") as file:
        file.writelines(encode_line(one) for one in more)

    async def play():
        job = followed(folder, lambda _: [])
        await job.ready()
        shown = job.sections()
        await job.close()
        return shown

    shown = asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
    assert (shown.job.run, shown.job.events) == (2, 2)
    assert shown.account.wall_s == 10.0


def test_the_first_publication_of_a_short_log_has_all_of_it(folder):
    """A page that is opened shows the job at once, and not that nothing was read so far."""

    async def play():
        job = FollowedJob("j", folder, lambda _: [], None)
        found = await job.next_publication(0, DEADLINE_S)
        await job.close()
        return json.loads(bytes(found.sections["job"][1]))

    shown = asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
    assert shown["is_read"] and shown["state"] != "reading", shown
