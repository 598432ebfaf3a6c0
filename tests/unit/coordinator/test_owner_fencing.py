"""Agents that the job's owner has given up or knows to be dead."""

from coordinator_driver import Driver, job_spec
from test_in_place_recovery import able
from test_state_holders import unheard

from elastane.agent import rules
from elastane.errors import ExitCode
from elastane.protocol.events import Fenced
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Assign, Holding, Refused, Stop
from elastane.protocol.model import Fence


def pods(low=1, high=3):
    """Three nodes in training, each an agent of a pod."""
    job = Driver(job_spec(low, high), store_backed=True)
    for name in "abc":
        job.join(name, f"uid-{name}.1")
    assert job.ranks() == ["a", "b", "c"]
    return job


def test_a_fenced_member_is_refused_and_is_not_in_the_next_world():
    job = pods()
    job.handle(Fenced(("uid-c",)))
    [refused] = job.got("c", Refused)
    assert refused.slug == "node-fenced" and "uid-c.1" in refused.what
    assert rules.refused(refused).exit_code == ExitCode.TRY_AGAIN, "it did nothing wrong"
    assert "c" in job.hangups
    assert job.got("a", Stop) and not job.got("c", Stop)
    job.stops("a", "b")
    job.passes(0.5, alive="ab")
    assert job.ranks() == ["a", "b"]
    assert job.machine.report().restarts_used == 0, "the loss of a pod is no failure"


def test_a_fenced_pod_is_refused_and_its_replacement_is_admitted():
    job = pods()
    job.handle(Fenced(("uid-c",)))
    job.stops("a", "b")
    job.join("c", "uid-c.2")
    assert len(job.got("c", Refused)) == 2, "another agent of the same pod"
    job.join("c", "uid-d.1")
    job.passes(2.0, alive="abc")
    assert len(job.got("c", Refused)) == 2


def test_fencing_compares_whole_pod_names():
    job = pods()
    job.handle(Fenced(("uid", "uid-", "")))
    assert not job.hangups
    job.join("d", "uid.1")
    assert job.got("d", Refused)


def test_an_agent_fenced_before_it_joins_is_refused():
    job = Driver(job_spec(1, 2), store_backed=True)
    job.handle(Fenced(("old",)))
    job.join("a", "old.1")
    assert job.got("a", Refused)
    job.join("a", "new.1")
    job.passes(4.0, alive="a")
    assert job.got("a", Assign)


def test_a_fence_holds_while_the_coordinator_has_no_authority():
    job = pods()
    job.authority(False)
    job.handle(Fenced(("uid-b",)))
    assert job.got("b", Refused) and "b" in job.hangups
    assert not job.got("a", Stop), "what follows of it is decided later"
    job.authority(True)
    assert job.got("a", Stop)


def test_a_repeated_fencing_list_changes_nothing():
    job = pods()
    for _ in range(3):
        job.handle(Fenced(("uid-c",)))
    departed = [event for event in job.events if event.kind is EventKind.NODE_DEPARTED]
    assert len(departed) == len(job.hangups) == 1


def test_presence_lists_agents_here_and_members_that_departed():
    job = pods()
    assert [tuple(one) for one in job.machine.presence()] == [
        ("uid-a.1", "joined", 0),
        ("uid-b.1", "joined", 1),
        ("uid-c.1", "joined", 2),
    ]
    job.breaks("c")
    states = {one.incarnation: one.state for one in job.machine.presence()}
    assert states["uid-c.1"] == "away"
    job.passes(0.3, alive="ab")
    states = {one.incarnation: one.state for one in job.machine.presence()}
    assert states == {"uid-a.1": "joined", "uid-b.1": "joined", "uid-c.1": "departed"}


def test_no_member_counts_as_departed_while_a_new_coordinator_waits():
    record = pods().persisted[-1]
    job = Driver(job_spec(1, 3), record, store_backed=True)
    assert job.phase == "recovering" and job.machine.presence() == []
    job.join("a", "uid-a.1")
    assert [one.state for one in job.machine.presence()] == ["joined"]


def test_a_fenced_member_without_a_connection_departs():
    job = pods()
    job.breaks("c")
    job.handle(Fenced(("uid-c",)))
    assert not job.got("c", Refused)
    assert job.got("a", Stop)
    job.stops("a", "b")
    job.passes(0.5, alive="ab")
    assert job.ranks() == ["a", "b"]
    job.join("c", "uid-c.1")
    assert job.got("c", Refused)


# The dead.


def holding(job, node_id, **more):
    return Holding(assignment=job.assigned[node_id], state="running", **more)


def successor(job, *dead):
    """Return the next coordinator of a job, which knows the dead pods before it admits nodes."""
    after = Driver(job.spec, job.persisted[-1], store_backed=True, previous_holder="c")
    after.assigned = dict(job.assigned)
    after.handle(Fenced((), dead))
    return after


def test_a_dead_coordinators_node_is_not_awaited():
    job = pods()
    for dead, phase in ((("uid-c",), "stopping"), ((), "recovering")):
        after = successor(job, *dead)
        for name in "ab":
            after.join(name, f"uid-{name}.1", holding=holding(job, name))
        assert after.machine.phase == phase


def test_several_dead_nodes_are_not_awaited():
    job = pods()
    after = successor(job, "uid-c", "uid-b")
    assert after.machine.phase == "recovering"
    after.join("a", "uid-a.1", holding=holding(job, "a"))
    assert after.got("a", Stop)
    after.stops("a")
    after.passes(2.0, alive="a")
    assert after.ranks() == ["a"]


def test_dead_members_do_not_count_as_possibly_training():
    job = pods()
    after = successor(job, "uid-a", "uid-b", "uid-c")
    after.join("d", "uid-d.1")
    after.passes(3.0, alive="d")
    assert after.ranks() == ["d"], "nobody can train where this coordinator does not see it"


def test_a_dead_pod_does_not_exclude_a_new_pod_of_its_name():
    """The new pod has the same node id and another uid, and may be back already."""
    job = pods()
    after = successor(job, "uid-c")
    after.join("c", "uid-new.1")
    assert after.machine.phase == "recovering"
    for name in "ab":
        after.join(name, f"uid-{name}.1", holding=holding(job, name))
    after.stops("a", "b")
    after.passes(2.0, alive="abc")
    assert after.ranks() == ["a", "b", "c"]


def test_dead_workers_do_not_count_as_possibly_training():
    job = unheard(spec=job_spec(1, 2), incarnation="uid-{}.1")
    assert "may hold the state" in job.machine.report().reason
    job.handle(Fenced((), ("uid-b",)))
    able(job, "c")
    assert job.assigned["c"].fence == Fence(2, 0)
    job.handle(Fenced((), ("uid-a", "uid-b")))
    assert job.assigned["c"].fence == Fence(3, 0)


def test_a_connected_agent_reported_dead_departs_with_its_workers():
    job = pods()
    job.handle(Fenced((), ("uid-c",)))
    assert "c" in job.hangups and job.got("a", Stop)
    assert not job.machine._state.worlds.intact
