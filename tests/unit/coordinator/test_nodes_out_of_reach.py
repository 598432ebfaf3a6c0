"""Members that do not reach one another: who is left out, for how long, and what the job says."""

import random

import pytest
from coordinator_driver import Driver, job_spec
from test_in_place_recovery import able, dies, in_place, kinds

from elastane.coordinator.rules.cuts import surplus
from elastane.protocol.culprits import ProcessFacts, StandstillEvidence
from elastane.protocol.limits import LEFT_OUT_FIRST_S, LEFT_OUT_MAX_S, LOST_PEER_S
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Able,
    Alive,
    Close,
    Drain,
    Heartbeat,
    Holding,
    Interrupt,
    Lost,
    Prepare,
    ProbeResult,
    StandstillReport,
    Stop,
)
from elastane.protocol.model import PortOffer, WaitPoint

GLOO = (
    "lost a peer: Gloo connectFullMesh failed with timed out connecting: SO_ERROR: No route to"
    " host, remote=[{}]:41$2 [group-not-built]"
)


def address(job, node_id):
    return f"10.0.0.{job.sessions[node_id][0]}"


def stands(job, node_id, *others, met=False):
    """The node's workers wait, and do not reach `others`; `met`: they had met in this world."""
    given = job.assigned[node_id]
    beat = Heartbeat(
        fence=given.fence,
        met=given.fence.round if met else 0,
        waiting=(WaitPoint(given.rank_base, "all_reduce"),),
        unanswered=tuple(address(job, other) for other in others),
    )
    job.says(node_id, beat)


def members(job):
    return [member.node_id for member in job.persisted[-1].world.members]


def let_in(job, node_id, others):
    """Let the pause of a node pass, and the others reach the boundary where it joins."""
    job.inbox.clear()
    job.passes(3.0, alive=[*others, node_id])
    reach_boundary(job, node_id, others)


def reach_boundary(job, node_id, others):
    """Let the others reach the boundary of the drain at which a node joins."""
    for other in others:
        job.marks(other, 5)
    for other in others:
        job.drains(other)
    able(job, *others, node_id)
    job.passes(10.0, alive=[*others, node_id])


def apart(nodes="abc", **more):
    """A job in place that has left c out, since b and c do not reach each other."""
    job = in_place(nodes=nodes, **more)
    for node_id in nodes:
        stands(job, node_id, *{"b": "c", "c": "b"}.get(node_id, ""))
    able(job, *nodes)
    job.inbox.clear()
    return job


def probes(job, node_id):
    """What the coordinator asks an agent to try, in its answer to a heartbeat."""
    job.says(node_id, Heartbeat())
    return job.got(node_id, Alive)[-1].probes


def finds(job, node_id, *, answers):
    """The agent reports what its probes found."""
    results = tuple(ProbeResult(probe, answers) for probe in probes(job, node_id))
    job.says(node_id, Heartbeat(probed=results))


def readmitted(job):
    return [event.node_id for event in job.events if event.kind is EventKind.NODE_READMITTED]


def reasons(job, kind):
    return [event.reason for event in job.events if event.kind is kind]


def test_a_job_continues_without_the_last_node_of_a_pair_that_cannot_connect():
    job = in_place(nodes="abc")
    stands(job, "a")
    stands(job, "b", "c")
    assert kinds(job, "a") == [], "c may still move"
    stands(job, "c", "b")
    assert members(job) == ["a", "b"]
    [why] = reasons(job, EventKind.INCIDENT)
    assert "node b does not reach node c at 10.0.0.3" in why
    assert "the job continues without c" in why and "elastane doctor --nodes" in why
    assert job.persisted[-1].restarts_used == 0
    assert Stop not in kinds(job, "c"), "its workers keep their state"


def test_connections_that_worked_are_replaced_once_before_a_node_is_left_out():
    job = in_place(nodes="abc")
    for node_id, others in (("a", ()), ("b", "c"), ("c", "b")):
        stands(job, node_id, *others, met=True)
    assert members(job) == ["a", "b", "c"] and Interrupt not in kinds(job, "a")
    [told] = reasons(job, EventKind.STALL)
    assert "node b does not reach node c at 10.0.0.3" in told and "all TCP ports" in told


def test_a_node_that_was_left_out_before_is_left_out_at_once_and_for_twice_as_long():
    job = in_place(nodes="abc")
    for node_id, others in (("a", ()), ("b", "c"), ("c", "b")):
        stands(job, node_id, *others)
    able(job, "a", "b", "c")
    job.passes(LEFT_OUT_FIRST_S - 1, alive="abc")
    assert members(job) == ["a", "b"], "c waits for its pause"
    let_in(job, "c", "ab")
    assert members(job) == ["a", "b", "c"]
    for node_id, others in (("a", ()), ("b", "c"), ("c", "b")):
        stands(job, node_id, *others, met=True)
    assert members(job) == ["a", "b"], "its connections were made for this world"
    able(job, "a", "b", "c")
    job.inbox.clear()
    job.passes(2 * LEFT_OUT_FIRST_S - 1, alive="abc")
    assert not job.got("a", Drain)
    let_in(job, "c", "ab")
    assert members(job) == ["a", "b", "c"]


def test_the_agents_of_a_pair_probe_the_addresses_that_did_not_answer():
    job = apart()
    assert [probe.address for probe in probes(job, "b")] == [address(job, "c")]
    assert [probe.address for probe in probes(job, "c")] == [address(job, "b")]
    assert probes(job, "a") == ()
    [told] = [event for event in job.events if event.kind is EventKind.NODE_LEFT_OUT]
    assert told.node_id == "c" and "node b does not reach node c at 10.0.0.3" in told.reason
    assert told.data == {"pause_s": LEFT_OUT_FIRST_S, "probes": 2}


def test_a_node_joins_again_at_once_when_all_probes_are_answered():
    job = apart()
    finds(job, "b", answers=True)
    assert not readmitted(job), "c has not reported"
    finds(job, "c", answers=True)
    assert readmitted(job) == ["c"]
    assert probes(job, "b") == probes(job, "c") == ()
    let_in(job, "c", "ab")
    assert members(job) == ["a", "b", "c"]


def test_a_node_stays_out_beyond_its_pause_while_a_probe_is_not_answered():
    job = apart()
    finds(job, "b", answers=True)
    finds(job, "c", answers=False)
    job.passes(LEFT_OUT_FIRST_S + 10, alive="abc")
    assert not readmitted(job)
    finds(job, "c", answers=True)
    assert readmitted(job) == ["c"]


def test_a_probe_that_is_never_answered_keeps_a_node_out_for_an_hour_at_most():
    job = apart()
    finds(job, "c", answers=False)
    began_s = job.now_s
    while not readmitted(job):
        job.now_s += 1.0
        for node_id in "abc":
            job.says(node_id, Heartbeat())
    assert job.now_s - began_s == pytest.approx(LEFT_OUT_MAX_S, abs=2.0)


def test_a_probe_of_a_node_that_has_gone_holds_nobody_back():
    job = apart(nodes="abcd", high=4)
    finds(job, "c", answers=False)
    job.breaks("b")
    able(job, "a", "d")
    job.passes(LEFT_OUT_FIRST_S - 10, alive="acd")
    assert not readmitted(job)
    job.passes(20, alive="acd")
    assert readmitted(job) == ["c"]


def test_a_link_that_comes_and_goes_stops_the_others_seldom():
    job = apart()
    finds(job, "b", answers=True), finds(job, "c", answers=True)
    let_in(job, "c", "ab")
    for node_id, others in (("a", ()), ("b", "c"), ("c", "b")):
        stands(job, node_id, *others, met=True)
    able(job, "a", "b", "c")
    finds(job, "b", answers=True), finds(job, "c", answers=True)
    job.passes(LEFT_OUT_FIRST_S - 10, alive="abc")
    assert readmitted(job) == ["c"], "the second pause is longer, also with an answer"
    job.passes(20, alive="abc")
    assert readmitted(job) == ["c", "c"]


def test_an_answer_to_an_earlier_question_counts_for_nothing():
    job = apart()
    old = [(each, probes(job, each)) for each in "bc"]
    for node_id, asked in old:
        job.says(node_id, Heartbeat(probed=tuple(ProbeResult(p, True) for p in asked)))
    let_in(job, "c", "ab")
    for node_id, others in (("a", ()), ("b", "c"), ("c", "b")):
        stands(job, node_id, *others, met=True)
    able(job, "a", "b", "c")
    for node_id, asked in old:
        job.says(node_id, Heartbeat(probed=tuple(ProbeResult(p, False) for p in asked)))
    job.passes(2 * LEFT_OUT_FIRST_S + 10, alive="abc")
    assert readmitted(job) == ["c", "c"]


def test_a_new_coordinator_finds_the_cut_as_the_first_did_and_the_node_comes_back_at_no_charge():
    before = apart()
    job = Driver(before.spec, before.persisted[-1], store_backed=True)
    job.assigned = dict(before.assigned)
    for node_id in "abc":
        held = Holding(
            assignment=job.assigned[node_id], state="running", able=(0, 1), in_place=True
        )
        job.join(node_id, holding=held)
    job.passes(2.0, alive="abc")
    assert members(before) == ["a", "b"] and kinds(job, "a")[-1] is Drain, "c is not known as cut"
    reach_boundary(job, "c", "ab")
    assert members(job) == ["a", "b", "c"]
    for node_id, others in (("a", ()), ("b", "c"), ("c", "b")):
        stands(job, node_id, *others)
    able(job, "a", "b", "c")
    assert members(job) == ["a", "b"]
    for node_id in "bc":
        finds(job, node_id, answers=True)
    assert readmitted(job) == ["c"]
    let_in(job, "c", "ab")
    assert members(job) == ["a", "b", "c"] and job.persisted[-1].restarts_used == 0
    assert Stop not in [kind for node_id in "abc" for kind in kinds(job, node_id)]


def test_a_firewall_that_refuses_connections_would_answer_a_probe_so_none_is_made():
    job = in_place(nodes="abc")
    said = GLOO.format(address(job, "c")).replace("No route to host", "Connection refused")
    for _ in range(2):  # The first world is followed by one of the same nodes.
        job.says("b", Lost(fence=job.assigned["b"].fence, reason=said))
        job.passes(LOST_PEER_S + 0.5, alive="abc")
        able(job, "a", "b", "c")
    assert members(job) == ["a", "b"]
    assert probes(job, "b") == probes(job, "c") == ()
    job.passes(LEFT_OUT_FIRST_S + 10, alive="abc")
    assert readmitted(job) == ["c"]


def without_state():
    """A job of b and c: b is ranked first, and its one worker has no state."""
    job = in_place(nodes="bc", min_workers=1)
    for node_id in "bc":
        stands(job, node_id, met=True)
    dies(job, "b", 0, 1)
    able(job, "b", workers=(1,)), able(job, "c"), able(job, "b")
    job.passes(1.2, alive="bc")
    for node_id in "bc":
        job.marks(node_id, 5), job.drains(node_id)
    able(job, "b"), able(job, "c")
    dies(job, "b", 1, 2)
    assert members(job) == ["b", "c"]
    able(job, "b", workers=(0,)), able(job, "c")
    return job


def test_of_two_nodes_the_one_without_the_state_is_left_out():
    job = without_state()
    for node_id, other in (("b", "c"), ("c", "b")):
        stands(job, node_id, other)
    job.passes(0.5, alive="bc")
    [told] = [event for event in job.events if event.kind is EventKind.NODE_LEFT_OUT]
    assert told.node_id == "b", "c alone has made steps"


@pytest.mark.parametrize("stays", [1, 2])
def test_the_node_that_most_others_do_not_reach_is_left_out(stays):
    job = in_place(low=stays, nodes="abc")
    stands(job, "a", "b")
    stands(job, "b", "a", "c")
    stands(job, "c", "b")
    assert members(job) == ["a", "c"]


def test_a_job_of_a_fixed_size_names_the_pair_and_ends_after_join_timeout():
    job = in_place(low=3, nodes="abc", timing={"join_timeout_s": 40.0})
    began_s = job.now_s
    while not (closed := job.got("a", Close)) and job.now_s < began_s + 200:
        able(job, "a", "b", "c")
        for node_id in "abc":
            stands(job, node_id, *{"a": "", "b": "c", "c": "b"}[node_id])
        given = job.assigned["c"]
        job.says("c", Lost(fence=given.fence, reason=GLOO.format(address(job, "b"))))
        job.passes(LOST_PEER_S + 8.0, alive="abc")
    [outcome] = [message.outcome for message in closed]
    assert outcome.slug == "world-stalled" and not outcome.ok
    assert "node c does not reach node b at 10.0.0.2" in outcome.reason
    assert "--local-addr" in outcome.next_step
    assert 40.0 <= job.now_s - began_s < 80.0


def test_an_address_that_belongs_to_no_node_is_named_and_nobody_is_left_out():
    job = in_place(nodes="ab")
    for node_id in "ab":
        given = job.assigned[node_id]
        at = (WaitPoint(given.rank_base, "all_reduce"),)
        job.says(node_id, Heartbeat(fence=given.fence, waiting=at, unanswered=("192.0.2.1",)))
    [told] = reasons(job, EventKind.STALL)
    assert "node a does not reach 192.0.2.1" in told
    assert kinds(job, "a") == []


def test_a_node_that_is_needed_is_let_in_before_its_pause_ends():
    job = in_place(low=2, nodes="abc")
    for node_id, others in (("a", ()), ("b", "c"), ("c", "b")):
        stands(job, node_id, *others)
    assert members(job) == ["a", "b"]
    able(job, "a", "b", "c")
    job.breaks("b")
    job.passes(1.0, alive="ac")
    assert members(job) == ["a", "c"]


def test_a_spare_takes_the_place_of_the_node_that_is_left_out():
    job = in_place(low=3, nodes="abc")
    job.join("d")
    for node_id, others in (("a", ()), ("b", "c"), ("c", "b")):
        stands(job, node_id, *others)
    assert Prepare in kinds(job, "d"), "a place is free, though c keeps its workers"
    [prepare] = job.got("d", Prepare)
    offer = PortOffer(9000, True)
    job.says("d", Able(workers=(0, 1), offer=offer, fence=prepare.assignment.fence))
    able(job, "a", "b")
    job.passes(3.0, alive="abcd")
    assert members(job) == ["a", "b", "d"]


def test_a_drain_ends_where_two_nodes_do_not_reach_each_other():
    job = in_place(low=1, nodes="abc")
    job.leaves("a")
    assert job.phase == "draining"
    for node_id, others in (("a", ()), ("b", "c"), ("c", "b")):
        stands(job, node_id, *others)
    job.passes(1.0, alive="abc")
    [why] = reasons(job, EventKind.INCIDENT)
    assert "the job continues without c" in why
    assert "c" not in members(job)


def test_workers_that_start_afresh_are_stopped_and_the_job_continues_without_the_node():
    job = Driver(job_spec(2, 3))
    for node_id in "abc":
        job.join(node_id)
    for node_id in "abc":
        stands(job, node_id, *{"a": "", "b": "c", "c": "b"}[node_id])
    assert Stop not in kinds(job, "a"), "the workers may still make collectives"
    for node_id in "abc":
        rank = job.assigned[node_id].rank_base
        shown = (StandstillEvidence(rank=rank, node_id=node_id, facts=ProcessFacts()),)
        fence = job.assigned[node_id].fence
        job.says(node_id, StandstillReport(fence=fence, still_s=21.0, evidence=shown))
    job.stopped_all("a", "b", "c")
    assert members(job) == ["a", "b"]
    assert job.persisted[-1].restarts_used == 0


def test_workers_that_could_not_connect_at_their_start_begin_again_without_the_node():
    job = Driver(job_spec(2, 3))
    for node_id in "abc":
        job.join(node_id)
    job.fails("b", GLOO.format(address(job, "c")))
    job.fails("c", "RuntimeError: Connection closed by peer")
    job.passes(0.5, alive="abc")
    job.stopped_all("a", "b", "c")
    job.passes(5.0, alive="abc")
    assert members(job) == ["a", "b"]
    assert job.persisted[-1].restarts_used == 0, "the network failed, and no worker"


def test_a_refused_connection_leaves_nobody_out():
    job = Driver(job_spec(2, 3))
    for node_id in "abc":
        job.join(node_id)
    said = GLOO.format(address(job, "c")).replace("No route to host", "Connection refused")
    job.fails("b", said)
    job.passes(0.5, alive="abc")
    job.stopped_all("a", "b", "c")
    job.passes(5.0, alive="abc")
    assert members(job) == ["a", "b", "c"]


@pytest.mark.parametrize("seed", range(200))
def test_nodes_that_are_left_reach_one_another_and_no_more_leave_than_pairs_need(seed):
    chance = random.Random(seed)
    order = [f"n{number}" for number in range(chance.randint(2, 9))]
    pairs = [tuple(chance.sample(order, 2)) for _ in range(chance.randint(0, 12))]
    chosen = surplus(pairs, order)
    left = {*order} - {*chosen}
    assert not any({*pair} <= left for pair in pairs)
    assert len(chosen) == len({*chosen}) <= len({frozenset(pair) for pair in pairs})
    for node_id in chosen:  # each was in a pair with a node that was chosen later, or stays
        assert any(node_id in pair for pair in pairs)


@pytest.mark.parametrize("seed", range(60))
def test_any_cuts_end_in_a_world_that_steps_or_in_a_job_that_names_them(seed):
    """Nodes that are cut stand still, the others step: the job finds a world, or says why not."""
    chance = random.Random(seed)
    names = "abcdef"[: chance.randint(2, 6)]
    low = chance.randint(1, len(names))
    cuts = {frozenset(chance.sample(names, 2)) for _ in range(chance.randint(1, 5))}
    job = in_place(low=low, high=len(names), nodes=names, timing={"join_timeout_s": 60.0})
    end_s = job.now_s + 300.0
    while job.now_s < end_s and not job.got(names[0], Close):
        world = members(job)
        silent = {n: [o for o in world if frozenset((n, o)) in cuts] for n in world}
        able(job, *names)
        if not any(silent.values()):
            break
        fence = job.assigned[world[0]].fence
        for node_id, others in silent.items():
            if job.assigned[node_id].fence == fence:
                stands(job, node_id, *others)
        if job.assigned[world[0]].fence == fence:  # too few would be left: gloo gives up
            asking, others = next((n, o) for n, o in silent.items() if o)
            job.says(asking, Lost(fence=fence, reason=GLOO.format(address(job, others[0]))))
            job.passes(8.0, alive=names)
    if closed := job.got(names[0], Close):
        assert "does not reach" in closed[0].outcome.reason
        assert closed[0].outcome.slug == "world-stalled"
    else:
        world = members(job)
        assert len(world) >= low
        assert not any(pair <= {*world} for pair in cuts), (world, cuts)
