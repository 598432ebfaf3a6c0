"""Events of the operator: each is one object, with the number of its occurrences."""

import asyncio

import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.client import ApiConflictError, ApiError, ApiNotFoundError
from elastane.kubernetes.model import Refusal, ReportedEvent
from elastane.kubernetes.operator import reporting
from elastane.kubernetes.operator.reporting import EventCount, EventPublisher, EventSubject

ABOUT = EventSubject("elastic.pytorch.org/v1alpha1", "ElasticJob", "n", "j", "uid")
LASTS = ReportedEvent(type="Warning", reason="Unschedulable", message="no node has room", count=1)
HAPPENS = ReportedEvent(type="Normal", reason="PodDeleted", message="j-worker-0 is being deleted")


class Events:
    """The API server's events."""

    def __init__(self):
        self.there, self.writes, self.fails = {}, 0, 0

    async def create(self, resource, namespace, body, kind):
        self._write()
        if body["metadata"]["name"] in self.there:
            raise ApiConflictError("it is there")
        self.there[body["metadata"]["name"]] = dict(body)
        return EventCount(body["count"])

    async def patch(self, resource, namespace, name, patch, kind):
        self._write()
        if name not in self.there:
            raise ApiNotFoundError("it is not there")
        self.there[name] |= patch
        return EventCount(patch["count"])

    async def find(self, resource, namespace, name, kind):
        found = self.there.get(name)
        return found and EventCount(found["count"])

    def _write(self):
        self.writes += 1
        if self.fails:
            self.fails -= 1
            raise ApiError("the server has troubles")

    @property
    def counts(self):
        return [event["count"] for event in self.there.values()]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(reporting, "EVENT_COUNT_S", 0.0)
    return Events()


async def tell(recorder, *told):
    """Record these events, each after the earlier ones were written or had failed."""
    running = asyncio.create_task(recorder.run())
    for one in told:
        recorder.record(ABOUT, one)
        recorder.tried.clear()
        if recorder.is_behind:
            await asyncio.wait_for(recorder.tried.wait(), 60.0)
    running.cancel()


class Watched(EventPublisher):
    """A publisher that shows its progress to the test."""

    def __init__(self, server):
        self.tried = asyncio.Event()
        super().__init__(server, "operator", lambda outcome: self.tried.set())

    @property
    def is_behind(self):
        return any(one.count > one.written for one in self._entries.values())


def record(server, *told):
    """Let an operator record these events."""
    asyncio.run(tell(Watched(server), *told))


def test_a_lasting_condition_is_one_event_with_count_one(server):
    record(server, *[LASTS] * 52)
    assert (server.counts, server.writes) == ([1], 1)


def test_another_operator_does_not_add_to_what_lasts(server):
    record(server, LASTS)
    record(server, LASTS, LASTS)
    assert server.counts == [1]
    assert server.writes == 2, "the second operator's only found that it is there"


def test_repeated_events_are_counted_also_by_another_operator(server):
    record(server, HAPPENS, HAPPENS)
    record(server, HAPPENS)
    assert server.counts == [3]


def test_a_count_that_grows_is_written_and_one_that_shrinks_is_not(server):
    looping = [
        ReportedEvent(type="Warning", reason="CrashLooping", message="x", count=n) for n in (3, 19)
    ]
    record(server, *looping, looping[0])
    assert (server.counts, server.writes) == ([19], 2)


def test_an_event_that_failed_is_written_when_it_is_recorded_again(server):
    server.fails = 1
    record(server, LASTS, LASTS)
    assert server.counts == [1]


def test_an_event_is_published_again_after_the_server_dropped_it(server, monkeypatch):
    monkeypatch.setattr(reporting, "EVENT_KEPT_S", -1.0)
    recorder = Watched(server)

    async def twice():
        await tell(recorder, LASTS)
        server.there.clear()
        await tell(recorder, LASTS)

    asyncio.run(twice())
    assert server.counts == [1]


def test_decisions_say_how_often_what_lasts_has_happened():
    cluster = Cluster(spec=spec_of(9, 1, 4))
    cluster.settle()
    for pod in cluster.pods.values():
        cluster.ask(pod, 30)
    cluster.end_deleted()
    refusal = Refusal(kind="Pod", name="j-worker-0", code=403, message="quota", times=7)
    cluster.refused = (refusal,)
    cluster.relist()
    decision, _ = cluster.operate()
    counts = {told.reason: told.count for told in decision.events}
    assert counts["FailedCreatePod"] == 7
    assert counts["ReplicasOutOfRange"] == 1
    for pod in cluster.pods.values():
        pod.phase, pod.waiting = "Pending", "ImagePullBackOff"
    cluster.relist()
    decision, _ = cluster.operate()
    counts = {told.reason: told.count for told in decision.events}
    assert counts["ImagePullBackOff"] == 1
