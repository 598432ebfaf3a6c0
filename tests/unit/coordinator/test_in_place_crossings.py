"""Recovery in place while messages cross, coordinators change, and workers end."""

import msgspec
import pytest
from coordinator_driver import Driver, job_spec, node_spec
from test_in_place_recovery import able, dies, in_place, kinds, regrouped

from elastane.agent.rules import AgentCore
from elastane.protocol.effects import RegroupWorkers, Transmit
from elastane.protocol.events import (
    GroupAble,
    GroupGone,
    Linked,
    MessageReceived,
    Unlinked,
    WorkerFailed,
    WorkerLost,
    WorkerSucceeded,
)
from elastane.protocol.limits import LOST_PEER_S, Timing
from elastane.protocol.messages import (
    Able,
    Assign,
    Close,
    Failed,
    Holding,
    Interrupt,
    Join,
    Lost,
    Prepare,
    Release,
    Stop,
    Stopped,
    Succeeded,
)
from elastane.protocol.model import Assignment, Failure, Fence, PortOffer

FIRST = Assignment(
    fence=Fence(1, 0),
    node_rank=1,
    nodes=2,
    rank_base=2,
    world_size=4,
    role_rank_base=2,
    role_world_size=4,
    master_addr="a",
    master_port=7000,
    agent_store=True,
    restarts_used=0,
    max_restarts=3,
    reason="begins",
)
NEXT = msgspec.structs.replace(FIRST, fence=Fence(2, 0), workers=(0, 1), in_place=True)


def failure(local_rank, pid):
    return Failure(local_rank=local_rank, rank=2, pid=pid, exit_code=-9)


class Agent:
    """The agent rules of node b, with two workers that recover in place."""

    def __init__(self):
        self.core = AgentCore(
            job_spec(), node_spec("b"), PortOffer(7100, True), 0.0, self_fencing=False
        )
        self.effects, self.now_s = [], 1.0
        self.does(Linked(PortOffer(7101, True)), MessageReceived(Assign(FIRST)))
        self.does(GroupAble(Fence(1, 0), (0, 1), PortOffer(7102, True)))
        self.effects.clear()

    def does(self, *events):
        for event in events:
            self.effects += self.core.handle(event, self.now_s)

    def fails(self, local_rank, pid=50):
        self.does(WorkerFailed(Fence(1, 0), failure(local_rank, pid), self.now_s))

    def sent(self, kind):
        found = [e.message for e in self.effects if isinstance(e, Transmit)]
        return [m for m in found if isinstance(m, kind)]

    def holding(self):
        self.does(Unlinked("gone"), Linked(None))
        return self.sent(Join)[-1].holding


def holding(job, node_id, **more):
    """Return the Holding of an agent of `job` with two able workers of its latest assignment."""
    more.setdefault("able", (0, 1))
    return Holding(assignment=job.assigned[node_id], state=more.pop("state", "running"), **more)


def successor(job):
    """Return a new coordinator with the last one's record."""
    after = Driver(job.spec, job.persisted[-1], store_backed=True)
    after.assigned = dict(job.assigned)
    return after


# The agent.


def test_an_outdated_place_is_declined_and_the_coordinator_is_informed():
    """Otherwise its workers would wait for a place for ever, and no report would say so."""
    agent = Agent()
    agent.does(MessageReceived(Interrupt(fence=FIRST.fence, reason="c departed")))
    agent.now_s += 2 * Timing().isolation_limit_s  # The host stood still.
    agent.does(MessageReceived(Assign(NEXT)))
    assert not [e for e in agent.effects if isinstance(e, RegroupWorkers)]
    assert [m.fence for m in agent.sent(Lost)] == [NEXT.fence]
    assert "stood still" in agent.holding().halted


def test_a_worker_that_failed_is_not_able_any_more():
    agent = Agent()
    agent.fails(0)
    assert agent.holding().able == (1,)


def test_a_failure_that_crosses_the_next_assignment_is_reported_under_that_one():
    agent = Agent()
    agent.fails(1)
    agent.effects.clear()
    agent.does(MessageReceived(Prepare(assignment=NEXT)), MessageReceived(Assign(NEXT)))
    told = agent.sent(Failed)[-1]
    assert told.fence == Fence(2, 0) and [f.local_rank for f in told.failures] == [1]


def test_a_peer_lost_without_a_coordinator_is_reported_at_the_next_registration():
    agent = Agent()
    agent.does(Unlinked("gone"))
    agent.does(WorkerLost(Fence(1, 0), Fence(1, 0), "reset"))
    assert agent.holding().halted == "reset"
    agent.does(MessageReceived(Assign(NEXT)))
    assert agent.holding().halted == ""


def test_an_interrupt_is_reported_to_the_next_coordinator():
    agent = Agent()
    agent.does(MessageReceived(Interrupt(fence=Fence(1, 0), reason="a died")))
    assert agent.holding().halted == "a died"


def test_failures_whose_replacements_were_started_are_reported_as_such():
    agent = Agent()
    agent.fails(0)
    agent.does(MessageReceived(Prepare(assignment=NEXT)))
    assert agent.holding().renewed == (0,)
    agent.fails(0, pid=51)
    assert agent.holding().renewed == ()


def test_a_stop_of_a_world_that_the_agent_has_not_heard_of_stops_its_workers():
    agent = Agent()
    agent.does(MessageReceived(Stop(fence=Fence(2, 0), grace_s=1.0, reason="all")))
    agent.does(GroupGone(Fence(1, 0), PortOffer(7103, True)))
    assert [m.fence for m in agent.sent(Stopped)] == [Fence(2, 0)]


def test_workers_that_finished_before_their_next_world_are_reported_so():
    agent = Agent()
    agent.does(WorkerSucceeded(Fence(1, 0), 0), WorkerSucceeded(Fence(1, 0), 1))
    agent.does(MessageReceived(Assign(NEXT)))
    assert [m.fence for m in agent.sent(Succeeded)] == [Fence(1, 0), Fence(2, 0)]


def test_a_failed_joining_worker_does_not_prevent_the_success_of_the_others():
    agent = Agent()
    agent.does(MessageReceived(Assign(msgspec.structs.replace(NEXT, workers=(1,)))))
    agent.fails(0)
    agent.does(WorkerSucceeded(Fence(1, 0), 1))
    assert [m.fence for m in agent.sent(Succeeded)] == [Fence(2, 0)]


def test_the_offer_says_which_world_it_follows():
    agent = Agent()
    agent.does(MessageReceived(Assign(NEXT)))
    agent.does(GroupAble(Fence(1, 0), (0, 1), PortOffer(7103, True)))
    assert [m.fence for m in agent.sent(Able)] == [Fence(2, 0)]


# The coordinator.


def test_a_world_is_not_settled_at_the_port_of_the_last_one():
    job = in_place(nodes="ab", min_workers=1)
    dies(job, "b", 0, 1)
    dies(job, "b", 1, 2)
    assert job.machine.phase == "regrouping" and job.assigned["a"].fence == Fence(2, 0)
    able(job, "a")
    assert regrouped(job, "a") == (Fence(3, 0), 0, (0, 1), 2)


def test_a_leaving_node_of_a_fixed_size_job_is_released_while_others_wait():
    job = in_place(low=2, high=2)
    job.leaves("b")
    for node_id in "ab":
        job.marks(node_id, 7)
    job.drains("a"), job.drains("b")
    assert job.machine.phase == "regrouping" and kinds(job, "b")[-1] is Stop
    job.stops("b")
    assert kinds(job, "b")[-1] is Release and job.persisted[-1].restarts_used == 0


def test_a_node_that_leaves_before_it_has_a_place_is_released():
    job = in_place(nodes="ab")
    job.join("c")
    job.leaves("c")
    assert kinds(job, "c")[-1] is Stop
    job.says("c", Stopped(Fence(1, 0), PortOffer(1, True)))
    assert kinds(job, "c")[-1] is Release and kinds(job, "a") == []


def test_workers_that_finished_their_steps_are_not_drained_for_a_node_that_leaves():
    job = in_place(nodes="ab")
    able(job, "a", "b", workers=())
    job.leaves("b")
    assert job.machine.phase == "running"


def test_a_reason_to_wait_is_forgotten_with_its_world():
    job = in_place(low=1, high=1, nodes="a")
    job.says("a", Lost(fence=Fence(1, 0), reason="reset"))
    dies(job, "a", 0, 1), dies(job, "a", 1, 2)
    job.stops("a")
    assert job.assigned["a"].fence == Fence(1, 1)
    able(job, "a")
    job.passes(3 * LOST_PEER_S, alive="a")
    assert job.machine.phase == "running" and kinds(job, "a")[-1] is not Interrupt


def test_a_standby_that_registers_again_is_not_charged_again():
    job = in_place(nodes="ab", min_workers=1)
    dies(job, "a", 0, 1)
    able(job, "a", workers=(1,))
    dies(job, "a", 0, 2)
    assert job.persisted[-1].restarts_used == 2
    lost = (failure(0, 2),)
    job.join("a", holding=holding(job, "a", able=(1,), failures=lost, renewed=(0,)))
    job.join("a", holding=holding(job, "a", able=(1,), failures=lost))
    assert job.persisted[-1].restarts_used == 2
    assert kinds(job, "a")[-1] is Prepare, "it had not heard of the first one"


def test_a_new_coordinator_continues_a_world_that_no_agent_received():
    job = in_place(nodes="ab", min_workers=1)
    before = dict(job.assigned)
    dies(job, "b", 0, 1)
    after = successor(job)
    after.assigned = before
    after.join("a", holding=holding(after, "a"))
    after.join("b", holding=holding(after, "b", able=(1,), state="failed"))
    assert Stop not in kinds(after, "a") + kinds(after, "b")
    assert regrouped(after, "b") == (Fence(3, 0), 2, (1,), 3)


def test_an_agent_that_missed_its_assignment_keeps_its_workers():
    job = in_place(nodes="ab", min_workers=1)
    before = job.assigned["b"]
    dies(job, "a", 0, 1)
    able(job, "a", workers=(1,))
    job.inbox.clear()
    job.join("b", holding=Holding(assignment=before, state="running", able=(0, 1)))
    assert Stop not in kinds(job, "b")
    assert regrouped(job, "b") == (Fence(3, 0), 1, (0, 1), 3)
    assert job.persisted[-1].restarts_used == 1


def test_a_new_coordinator_waits_in_place_for_charged_replacements():
    job = in_place(low=2, high=2)
    dies(job, "b", 0, 1)
    after = successor(job)
    after.join("a", holding=holding(after, "a", halted="b died"))
    lost = {"failures": (failure(0, 1),), "state": "failed", "renewed": (0,)}
    after.join("b", holding=holding(after, "b", able=(1,), **lost))
    assert after.machine.phase == "regrouping" and after.persisted[-1].restarts_used == 1
    able(after, "b")
    assert regrouped(after, "b") == (Fence(2, 0), 2, (1, 0), 4)


@pytest.mark.parametrize("restarts", [1, 3])
def test_a_charge_of_which_no_agent_heard_is_not_made_again_by_a_new_coordinator(restarts):
    job = in_place(low=2, high=2, restarts=restarts)
    dies(job, "b", 0, 1)
    assert job.persisted[-1].restarts_used == 1
    after = successor(job)
    after.join("a", holding=holding(after, "a", halted="b died"))
    lost = {"failures": (failure(0, 1),), "state": "failed"}
    after.join("b", holding=holding(after, "b", able=(1,), **lost))
    after.passes(2.0, alive="ab")
    assert kinds(after, "b")[-1] is Prepare and after.persisted[-1].restarts_used == 1
    able(after, "b")
    assert regrouped(after, "b") == (Fence(2, 0), 2, (1, 0), 4)
    dies(after, "b", 0, 2)
    assert (after.persisted[-1].restarts_used == 2) == (restarts > 1), "the next one is charged"


def test_an_interrupted_world_is_not_resumed():
    job = in_place(nodes="ab")
    after = successor(job)
    for node_id in "ab":
        after.join(node_id, holding=holding(after, node_id, halted="c died"))
    after.passes(LOST_PEER_S + 0.2, alive="ab")
    assert regrouped(after, "b") == (Fence(2, 0), 2, (0, 1), 4)


def test_too_few_survivors_beside_finished_workers_restart():
    job = in_place(low=2, high=2)
    able(job, "a", workers=())
    dies(job, "b", 0, 1)
    assert kinds(job, "a") == [Interrupt]
    job.says("a", Succeeded(Fence(1, 0)))
    assert kinds(job, "a")[-1] is Stop and Close not in kinds(job, "a")


def test_a_worker_that_ends_slowly_is_not_taken_for_one_that_has_made_all_its_steps():
    """It cannot enter another world, as one that has finished its steps, until its end is seen."""
    job = in_place(low=2, high=2)
    able(job, "b", workers=(1,))
    dies(job, "b", 1, 1)
    assert Stop not in kinds(job, "a"), "its survivors hold the state"
    dies(job, "b", 0, 2)
    assert Stop not in kinds(job, "a") and Prepare in kinds(job, "b")


def test_a_replacement_gets_its_place_even_if_its_nodes_other_workers_finished():
    agent = Agent()
    agent.fails(0)
    agent.does(MessageReceived(Prepare(assignment=FIRST)))
    alone = msgspec.structs.replace(NEXT, workers=(1,))
    agent.does(MessageReceived(Assign(alone)), WorkerSucceeded(Fence(1, 0), 1))
    assert agent.sent(Succeeded) == [Succeeded(Fence(2, 0))]
    agent.does(GroupAble(Fence(1, 0), (0,), PortOffer(7103, True)))
    place = msgspec.structs.replace(NEXT, fence=Fence(3, 0), workers=(0,))
    agent.does(MessageReceived(Assign(place)))
    assert RegroupWorkers(Fence(1, 0), place, place.workers) in agent.effects
    agent.does(WorkerSucceeded(Fence(1, 0), 0))
    assert agent.sent(Succeeded)[-1] == Succeeded(Fence(3, 0))


def test_finished_workers_that_do_not_exit_cause_a_restart():
    job = in_place(low=2, high=2)
    able(job, "a", workers=())
    dies(job, "b", 0, 1)
    job.passes(job.spec.timing.join_timeout_s + 1.0, alive="ab")
    assert kinds(job, "a")[-1] is Stop


@pytest.mark.parametrize("finished", ["ab", "a", "b"])
def test_a_worker_that_dies_between_two_loops_of_the_others_is_replaced_in_place(finished):
    job = in_place(nodes="ab", min_workers=1)
    for node_id in finished:
        able(job, node_id, workers=())
    dies(job, "b", 0, 1)
    for node_id in finished:
        able(job, node_id, workers=(0, 1) if node_id == "a" else (1,))
    job.passes(2.0, alive="ab")
    able(job, "a")
    able(job, "b")
    job.passes(2.0, alive="ab")
    assert not {Stop, Close} & {*kinds(job, "a"), *kinds(job, "b")}
    assert job.persisted[-1].restarts_used == 1
    for node_id in "ab":
        job.marks(node_id, 3)
        job.drains(node_id)
    assert job.assigned["a"].world_size == job.assigned["b"].world_size == 4


def test_a_node_that_registered_with_stale_workers_gets_a_place_later():
    job = in_place(low=1, high=3, nodes="ab")
    stale = msgspec.structs.replace(job.assigned["a"], fence=Fence(0, 7), node_rank=2)
    job.join("c", holding=Holding(assignment=stale, state="running"))
    job.says("c", Stopped(Fence(0, 7), PortOffer(1, True)))
    able(job, "c")
    job.passes(1.2, alive="abc")
    for node_id in "ab":
        job.marks(node_id, 3)
    job.drains("a"), job.drains("b")
    assert regrouped(job, "c") == (Fence(2, 0), 4, (0, 1), 6)


def test_a_node_that_returns_while_stopping_its_workers_stops_no_others():
    """SIGTERM came while there was no coordinator, and the agent did not wait for one."""
    before = in_place(nodes="abc", low=1)
    job = successor(before)
    for node_id in "ab":
        job.join(node_id, holding=holding(before, node_id))
    job.join("c", holding=holding(before, "c", state="stopping", able=()))
    job.leaves("c")
    assert job.machine._state.in_place.active
    for node_id in "abc":
        job.marks(node_id, 3)
        job.drains(node_id)
    job.stops("c")
    job.passes(1.0, alive="ab")
    assert Release in kinds(job, "c")
    for node_id, base in (("a", 0), ("b", 2)):
        assert Stop not in kinds(job, node_id)
        assert regrouped(job, node_id) == (Fence(2, 0), base, (0, 1), 4)


def test_a_node_that_stops_its_workers_has_finished_none_of_them():
    job = in_place(nodes="ab", low=2, high=2)
    after = successor(job)
    after.join("a", holding=holding(job, "a"))
    after.join("b", holding=holding(job, "b", state="stopping", able=()))
    after.stops("b")
    able(after, "b")
    after.passes(2.0, alive="ab")
    assert Stop not in kinds(after, "a")
    assert regrouped(after, "a") == (Fence(2, 0), 0, (0, 1), 4)


def test_if_all_nodes_stop_their_workers_no_worker_gets_another_place():
    """The workers were able when they began to stop, and are so no longer."""
    job = in_place(nodes="ab", low=2, high=2)
    after = successor(job)
    for node_id in "ab":
        after.join(node_id, holding=holding(job, node_id, state="stopping"))
    after.stops("a", "b")
    after.passes(2.0, alive="ab")
    assert not after.assigned["a"].in_place and not after.assigned["b"].in_place
    assert after.assigned["a"].fence > job.assigned["a"].fence
