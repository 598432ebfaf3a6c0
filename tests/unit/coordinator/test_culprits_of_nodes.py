"""The coordinator compares the workers of all nodes once all of them stand still."""

from coordinator_driver import Driver, job_spec

from elastane.protocol.culprits import ProcessFacts, StandstillEvidence
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import EndWorker, Failed, StandstillReport
from elastane.protocol.model import Failure, Fence
from elastane.protocol.ring import GroupBoard, Position, RecordedCall, WorkerCalls

STOPPED = ProcessFacts(state="T", lock_held=True)


def running():
    job = Driver(job_spec(2, 2, 3))
    for node_id in "ab":
        job.join(node_id)
    job.passes(4.0, alive="ab")
    job.inbox.clear()
    return job


def standing(rank, node_id, begun, facts=None):
    """Return a worker that waits in the collective with this number, after nine complete ones."""
    board = GroupBoard(position=Position(begun, min(begun, 9)))
    return StandstillEvidence(
        rank=rank,
        node_id=node_id,
        facts=facts or ProcessFacts(),
        groups={"0": board},
        where=f"all_reduce (train.py:{rank}, main)",
    )


def stands_still(job, node_id, *begun, facts=None, still_s=21.0):
    base = job.assigned[node_id].rank_base
    evidence = [
        standing(base + place, node_id, count, facts if count < 10 else None)
        for place, count in enumerate(begun)
    ]
    fence = job.assigned[node_id].fence
    job.says(node_id, StandstillReport(fence=fence, still_s=still_s, evidence=tuple(evidence)))


def culprits(job):
    return [event for event in job.events if event.kind is EventKind.CULPRIT]


def test_the_culprit_is_named_across_nodes_once_all_stand_still():
    job = running()
    stands_still(job, "a", 10, 10)
    assert not culprits(job)
    stands_still(job, "b", 9, 10, still_s=20.5)
    [found] = culprits(job)
    assert found.data["class"] == "sleeps" and found.data["ranks"] == "2"
    assert found.data["still_s"] == 20.5
    assert found.reason.startswith("rank 2 on node b has not entered all_reduce #10 (train.py:0")
    assert not job.got("a", EndWorker) and not job.got("b", EndWorker)


def test_a_worker_is_ended_where_the_wait_never_ends():
    job = running()
    stands_still(job, "a", 10, 10)
    stands_still(job, "b", 9, 10, facts=STOPPED)
    [found] = culprits(job)
    assert found.data["class"] == "stopped" and found.data["certain"]
    [end] = job.got("b", EndWorker)
    assert (end.fence, end.rank, end.reason) == (Fence(1, 0), 2, found.reason)


def test_nothing_is_compared_while_some_workers_move():
    job = running()
    stands_still(job, "a", 10, 10)
    stands_still(job, "a")
    stands_still(job, "b", 9, 10)
    assert not culprits(job)


def test_a_report_of_another_world_is_ignored():
    job = running()
    stands_still(job, "a", 10, 10)
    late = StandstillReport(fence=Fence(0, 0), still_s=30.0, evidence=(standing(2, "b", 9),))
    job.says("b", late)
    assert not culprits(job)


def test_a_wait_that_passed_is_reported_again_once_it_lasts_twice_as_long():
    job = running()
    for still_s, reports in ((21.0, 1), (22.0, 1), (60.0, 2)):
        stands_still(job, "a", 10, 10, still_s=still_s)
        stands_still(job, "b", 9, 10, still_s=still_s)
        assert len(culprits(job)) == reports, still_s
        stands_still(job, "b", 9, 10, still_s=still_s)  # repeated: nothing new
        assert len(culprits(job)) == reports, still_s
        stands_still(job, "b")
        stands_still(job, "a")


def test_workers_that_all_compute_have_no_culprit():
    job = running()
    stands_still(job, "a", 9, 9)
    stands_still(job, "b", 9, 9)
    assert not culprits(job)


def made(rank, nbytes, site):
    """Return two collectives of a worker, the second of which is not complete."""
    calls = tuple(
        RecordedCall(
            number=count,
            operation="all_reduce",
            site=site,
            nbytes=28 if count == 4 else nbytes,
            group=0,
            count=count,
            entered_ns=count,
        )
        for count in (4, 5)
    )
    return WorkerCalls(rank=rank, calls=calls)


def fails(job, node_id, rank, message, *calls, code=1):
    base = job.assigned[node_id].rank_base
    failure = Failure(
        local_rank=rank - base, rank=rank, pid=50 + rank, exit_code=code, message=message,
        calls=calls,
    )  # fmt: skip
    job.says(node_id, Failed(fence=job.assigned[node_id].fence, failures=(failure,)))


def test_the_rank_that_sent_too_much_is_the_culprit_of_a_worker_that_gloo_ended():
    job = running()
    too_much = "Received data size doesn't match expected size."
    fails(job, "a", 1, too_much, made(0, 28, "a.py:1"), made(1, 28, "a.py:1"), code=-6)
    assert not culprits(job), "the workers of one node called alike"
    fails(job, "b", 2, "Connection closed by peer", made(2, 4000, "a.py:2"))
    fails(job, "b", 3, "Connection closed by peer", made(3, 28, "a.py:1"))
    [found] = culprits(job)
    assert found.data["class"] == "other-shape" and found.data["ranks"] == "2"
    assert found.data["culprit_node"] == "b"
    assert "rank 2 called all_reduce of 4,000 bytes (a.py:2)" in found.reason
