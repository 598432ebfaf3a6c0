"""The coordinator compares the workers of all nodes once all of them stand still."""

import pytest
from coordinator_driver import Driver, job_spec

from elastane.protocol.culprits import ProcessFacts, StandstillEvidence
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Able,
    AwaitedWorker,
    EndWorker,
    Failed,
    Heartbeat,
    Interrupt,
    LastCalls,
    ShowStacks,
    StandstillReport,
)
from elastane.protocol.model import Failure, Fence, Joining, PortOffer
from elastane.protocol.ring import GroupBoard, GroupCall, Position, RecordedCall, WorkerCalls
from elastane.protocol.words import OTHER_PROGRAM

STOPPED = ProcessFacts(state="T", lock_held=True)


def running(**options):
    job = Driver(job_spec(2, 2, 3, **options))
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


def stands_still(job, node_id, *begun, facts=None, still_s=21.0, early=False):
    base = job.assigned[node_id].rank_base
    evidence = [
        standing(base + place, node_id, count, facts if count < 10 else None)
        for place, count in enumerate(begun)
    ]
    fence = job.assigned[node_id].fence
    report = StandstillReport(fence=fence, still_s=still_s, evidence=tuple(evidence), early=early)
    job.says(node_id, report)


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
    assert [one.ranks for one in job.got("b", ShowStacks)] == [(2,)]


def test_where_no_rank_is_behind_the_stacks_of_two_are_shown():
    job = running()
    stands_still(job, "a", 10, 10)
    stands_still(job, "b", 10, 10)
    [found] = culprits(job)
    assert (found.data["class"], found.data["ranks"]) == ("network", "")
    assert [one.ranks for one in job.got("a", ShowStacks)] == [(0, 1)]


def test_before_the_limit_of_a_standstill_only_a_mismatch_is_reported():
    """The limit is the agents' own: of slow steps it may be far later than `hang_floor`."""
    job = running()
    stands_still(job, "a", 10, 10, still_s=30.0, early=True)
    stands_still(job, "b", 9, 10, still_s=30.0, early=True)
    assert not culprits(job)
    stands_still(job, "a", 10, 10)
    assert not culprits(job), "the other node has not stood still for long"
    stands_still(job, "b", 9, 10)
    assert len(culprits(job)) == 1


def differing(rank, node_id, operation):
    """Return a worker that is in its tenth collective, which is of this kind."""
    calls = (GroupCall(10, operation, 7, "Float"),)
    board = GroupBoard(position=Position(10, 9), backend="gloo", calls=calls)
    return StandstillEvidence(
        rank=rank, node_id=node_id, facts=ProcessFacts(), groups={"0": board}, where="main"
    )


def mismatch(job, *, still_s=2.1):
    called = {"a": ("allreduce", "allreduce"), "b": ("broadcast", "allreduce")}
    for node_id, operations in called.items():
        base = job.assigned[node_id].rank_base
        evidence = [differing(base + i, node_id, name) for i, name in enumerate(operations)]
        report = StandstillReport(
            fence=job.assigned[node_id].fence,
            still_s=still_s,
            evidence=tuple(evidence),
            early=True,
        )
        job.says(node_id, report)


def test_a_mismatch_ends_the_world_of_workers_in_place_at_once_and_names_the_rank():
    job = running()
    for node_id in "ab":
        able = Able(workers=(0, 1), offer=PortOffer(9000, True), joining=Joining.NEVER)
        job.says(node_id, able)
    mismatch(job)
    [found] = culprits(job)
    assert (found.data["class"], found.data["ranks"]) == ("other-collective", "2")
    assert not job.got("b", EndWorker), "no process is at fault"
    assert [one.reason for one in job.got("b", Interrupt)] == [found.reason]
    assert job.assigned["a"].fence == Fence(2, 0), "the survivors meet at once"
    text = "Traceback (most recent call last):\nelastane.errors.X: other program [in-place-restart]"
    for node_id in "ab":
        job.fails(node_id, text)
        job.fails(node_id, text, local_rank=1)
    job.stops("a", "b")
    [restart] = [event for event in job.events if event.kind is EventKind.RESTART]
    assert restart.data["cause"].startswith(f"{found.reason}; so worker of rank")
    assert (restart.data["cause_node"], restart.data["cause_rank"]) == ("b", 2)


def test_a_mismatch_of_other_workers_ends_the_rank_that_differs():
    job = running()
    mismatch(job)
    assert [one.rank for one in job.got("b", EndWorker)] == [2]
    assert not job.got("b", Interrupt) and not job.got("b", ShowStacks)


def test_a_worker_is_ended_where_the_wait_never_ends():
    job = running()
    stands_still(job, "a", 10, 10)
    stands_still(job, "b", 9, 10, facts=STOPPED)
    [found] = culprits(job)
    assert found.data["class"] == "stopped" and found.data["certain"]
    [end] = job.got("b", EndWorker)
    assert (end.fence, end.rank, end.reason) == (Fence(1, 0), 2, found.reason)


def test_a_job_is_stalled_from_the_report_of_an_agent_until_its_workers_make_steps():
    job = running()
    for node_id in "ab":
        job.says(node_id, Heartbeat(progress=7))
    job.passes(1.0)
    raised = "rank 3 on node b raised ValueError: planted; its process has not ended 2.0 s later"
    old, fence = Fence(0, 0), job.assigned["b"].fence
    for told in (old, fence):
        job.says("b", AwaitedWorker(fence=told, sentence=raised))
        assert job.machine.report().stalled == (raised if told == fence else "")
    for step in (7, 8):
        assert job.machine.report().stalled == raised
        for _ in range(20):
            job.now_s += 1.0
            for node_id in "ab":
                job.says(node_id, Heartbeat(progress=step))
    assert not job.machine.report().stalled


def test_a_job_is_not_stalled_in_the_world_after_that_of_the_awaited_worker():
    job = running()
    fence = job.assigned["b"].fence
    job.says("b", AwaitedWorker(fence=fence, sentence="rank 3 on node b raised ValueError"))
    assert job.machine.report().stalled
    failure = Failure(local_rank=1, rank=3, pid=9, exit_code=1)
    job.says("b", Failed(fence=fence, failures=(failure,)))
    job.passes(1.0, alive="ab")
    assert not job.machine.report().stalled


def test_the_end_of_a_reported_standstill_is_logged_and_until_then_the_job_is_stalled():
    job = running()
    stands_still(job, "a", 10, 10)
    stands_still(job, "b", 9, 10)
    [found] = culprits(job)
    assert job.machine.report().stalled == found.reason
    job.passes(2.0, alive="ab")
    stands_still(job, "b")
    [ended] = [event for event in job.events if event.kind is EventKind.CULPRIT_ENDED]
    assert ended.data["still_s"] == 23.0
    assert not job.machine.report().stalled
    stands_still(job, "a")
    assert job.events[-1] is ended, "once for a standstill"


def test_the_culprit_of_the_next_world_is_named_too():
    job = running()
    for attempt in range(2):
        stands_still(job, "a", 10, 10)
        stands_still(job, "b", 9, 10, facts=STOPPED)
        assert [one.rank for one in job.got("b", EndWorker)] == [2] * (attempt + 1)
        job.fails("b", exit_code=-6)
        job.stops("a", "b")
        assert job.assigned["b"].fence == Fence(1, attempt + 1)
    assert [one.data["class"] for one in culprits(job)] == ["stopped"] * 2


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


def test_a_wait_that_passed_before_is_reported_without_another_report_once_it_lasts_long():
    job = running()
    for _ in range(2):
        stands_still(job, "a", 10, 10)
        stands_still(job, "b", 9, 10)
        assert len(culprits(job)) == 1
        if job.machine.report().stalled:
            stands_still(job, "b")
            stands_still(job, "a")
    job.passes(20.0, alive="ab")
    assert len(culprits(job)) == 1
    job.passes(2.0, alive="ab")
    assert [one.data["still_s"] for one in culprits(job)] == pytest.approx([21.0, 42.0], abs=0.2)


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
    return WorkerCalls(rank=rank, local_rank=rank % 2, pid=50 + rank, calls=calls)


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
    assert (found.data["culprit_node"], found.data["culprit_pid"]) == ("b", 52)
    assert "rank 2 called all_reduce of 4,000 bytes (a.py:2)" in found.reason


def test_the_rank_that_sent_too_much_in_place_is_named_by_the_calls_of_survivors_elsewhere():
    """The survivors are in the next world before their agents answer, and find that they differ."""
    job = running(min_workers=1)
    world = job.assigned["a"].fence
    for node_id in "ab":
        able = Able(workers=(0, 1), offer=PortOffer(9000, True), joining=Joining.NEVER)
        job.says(node_id, able)
    too_much = "Received data size doesn't match expected size."
    fails(job, "a", 1, too_much, made(0, 28, "a.py:1"), made(1, 28, "a.py:1"), code=-6)
    for node_id in "ab":
        assert [one.asks_calls for one in job.got(node_id, Interrupt)] == [True]
    job.passes(1.0, alive="ab")
    assert job.assigned["b"].fence > world
    job.says("b", LastCalls(fence=Fence(0, 0), calls=(made(2, 28, "a.py:1"),)))
    assert not culprits(job), "they are of another world"
    told = LastCalls(fence=world, calls=(made(2, 4000, "a.py:2"), made(3, 28, "a.py:1")))
    for _ in range(2):
        job.says("b", told)
    [found] = culprits(job)
    assert (found.fence, found.data["ranks"], found.data["culprit_pid"]) == (world, "2", 52)
    text = f"elastane: all workers restart: {OTHER_PROGRAM}: operation 5 [in-place-restart]"
    fails(job, "a", 0, text, code=75)
    job.stops("a", "b")
    [restart] = [event.data for event in job.events if event.kind is EventKind.RESTART]
    assert restart["cause"].startswith(f"{found.reason}; so "), restart["cause"]
    assert (restart["cause_node"], restart["cause_pid"]) == ("b", 52)


def cause_after_wait(message, *, node_id, local_rank=0, exit_code=1, **more):
    """Let rank 2 on b compute while all others wait, a worker fail, and all stop."""
    job = running()
    stands_still(job, "a", 10, 10)
    stands_still(job, "b", 9, 10, facts=ProcessFacts(busy=1.0))
    [found] = culprits(job)
    assert found.data["class"] == "busy" and not found.data["certain"]
    failed = Failure(local_rank=local_rank, rank=job.assigned[node_id].rank_base + local_rank,
                     pid=0, exit_code=exit_code, message=message, age_s=0.0, **more)  # fmt: skip
    job.says(node_id, Failed(fence=job.assigned[node_id].fence, failures=(failed,)))
    job.stops("a", "b")
    [restart] = [event for event in job.events if event.kind is EventKind.RESTART]
    return found.reason, restart.data


def test_a_wait_that_others_give_up_remains_the_cause_and_names_its_culprit():
    lost = "RuntimeError: [pair.cc:5] Timed out waiting 1800000ms for recv operation to complete"
    sentence, found = cause_after_wait(lost, node_id="a", error_file="/e.json")
    assert found["cause"].startswith(f"{sentence}; so worker of rank 0 "), found["cause"]
    assert (found["cause_node"], found["cause_rank"]) == ("b", 2)
    assert found["consequences"] == 1


def test_the_end_of_a_worker_for_which_the_others_waited_is_told_after_what_it_did():
    """A person may have killed it, as the views propose."""
    sentence, found = cause_after_wait("", node_id="b", exit_code=-9, output=True)
    assert found["cause"].startswith(f"{sentence}; then worker of rank 2 "), found["cause"]
    assert (found["cause_node"], found["cause_rank"]) == ("b", 2)


@pytest.mark.parametrize(
    ("message", "exit_code"), [("ValueError: a bad sample", 1), ("Killed", -9)]
)
def test_a_failure_that_no_wait_explains_is_its_own_cause(message, exit_code):
    _, found = cause_after_wait(
        message, node_id="a", exit_code=exit_code, output=exit_code < 0
    )  # fmt: skip
    assert found["cause"].startswith("worker of rank 0 "), found["cause"]
    assert (found["cause_node"], found["cause_rank"]) == ("a", 0)


def test_a_wait_that_has_passed_explains_no_later_failure():
    job = running()
    stands_still(job, "a", 10, 10)
    stands_still(job, "b", 9, 10, facts=ProcessFacts(busy=1.0))
    for node_id in "ab":
        job.says(node_id, StandstillReport(fence=job.assigned[node_id].fence, still_s=0.0))
    job.fails("a", "Connection closed by peer")
    job.stops("a", "b")
    [restart] = [event for event in job.events if event.kind is EventKind.RESTART]
    assert restart.data["cause"].startswith("worker of rank 0 "), restart.data["cause"]
