"""Admission: each refusal names both sides and the next step; contests of a name are fair."""

import msgspec
import pytest
from coordinator_driver import VERSIONS, job_spec

from elastane.coordinator.rules.admission import ROUND_MAX
from elastane.protocol.events import Received
from elastane.protocol.messages import (
    Alive,
    Assign,
    Close,
    Heartbeat,
    Leave,
    Query,
    Refused,
    Release,
    Report,
    Welcome,
)
from elastane.protocol.model import Fence


def refused(driver, key):
    (message,) = driver.got(key, Refused)
    assert key in driver.hangups
    assert message.next_step and message.expected
    return message


def test_another_torch_is_refused_with_both_versions(pair):
    other = msgspec.structs.replace(VERSIONS, torch="2.12", accelerator="CUDA 12.8")
    pair.join("c", versions=other)
    message = refused(pair, "c")
    assert message.slug == "version-skew"
    assert "torch 2.13 in the job, 2.12 on node c" in message.what
    assert "accelerator none in the job, CUDA 12.8 on node c" in message.what


def test_another_job_is_refused_with_both_names(pair):
    pair.join("c", spec=msgspec.structs.replace(pair.spec, job="letters"))
    message = refused(pair, "c")
    assert message.slug == "wrong-job"
    assert "'digits'" in message.what and "'letters'" in message.what


def test_another_configuration_is_refused_with_both_values(pair):
    pair.join("c", spec=msgspec.structs.replace(pair.spec, max_nodes=5))
    message = refused(pair, "c")
    assert message.slug == "config-mismatch"
    assert "max_nodes: the job has 2, this agent 5" in message.what


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb"])
def test_a_node_id_that_cannot_be_used_is_refused(pair, name):
    pair.join(name, key="odd")
    assert refused(pair, "odd").slug == "bad-node-id"


@pytest.mark.parametrize("given", [{"role": "a/b"}, {"role": "r" * 201}, {"local_addr": "a\nb"}])
def test_a_role_or_an_address_that_cannot_be_used_is_refused(pair, given):
    pair.join("c", **given)
    message = refused(pair, "c")
    assert message.slug == "bad-name"
    assert next(iter(given)).replace("_", "-") in message.what


def test_an_absurd_round_is_refused(pair):
    pair.join("c", seen=Fence(ROUND_MAX + 1, 0))
    assert refused(pair, "c").slug == "bad-fence"
    held = pair.holding("a")
    beyond = msgspec.structs.replace(held.assignment, fence=Fence(ROUND_MAX + 1, 0))
    pair.join("d", holding=msgspec.structs.replace(held, assignment=beyond))
    assert refused(pair, "d").slug == "bad-fence"


def test_unequal_workers_are_refused_only_if_declared_identical(driver):
    strict = driver(job_spec(identical_workers=True))
    strict.join("a", size=2)
    strict.join("b", size=4)
    message = refused(strict, "b")
    assert message.slug == "unequal-nproc"
    assert "4 on node b" in message.what and "2 on node a" in message.what

    free = driver(job_spec())
    free.join("a", size=2)
    free.join("b", size=4)
    assert [free.assigned[n].rank_base for n in "ab"] == [0, 2]
    assert free.assigned["a"].world_size == 6


def test_a_static_job_admits_each_rank_once(driver):
    job = driver(job_spec(static=True))
    job.join("a", node_rank=1)
    job.join("b", node_rank=1)
    message = refused(job, "b")
    assert message.slug == "node-rank"
    assert "on node b and on node a" in message.what
    job.join("c")
    assert "--node-rank None on node c" in refused(job, "c").what
    job.join("d", node_rank=7)
    assert "--node-rank 7" in refused(job, "d").what
    job.join("e", node_rank=0)
    assert job.ranks() == ["e", "a"]


def end(job):
    job.succeeds("a", "b")
    assert job.phase == "closing"


def test_a_newcomer_to_an_ended_job_is_refused(pair):
    end(pair)
    pair.join("c")
    message = refused(pair, "c")
    assert message.slug == "job-closed"
    assert "'digits' has ended: all 4 workers" in message.what


def test_an_agent_that_returns_after_the_end_receives_the_outcome(pair):
    end(pair)
    pair.breaks("a")
    pair.inbox.clear()
    pair.join("a", welcomed=True, holding=pair.holding("a", "succeeded"))
    assert not pair.got("a", Refused)
    assert pair.got("a", Close)[0].outcome.ok


def test_a_second_live_agent_of_one_name_is_refused_and_the_first_stays(pair):
    pair.join("a", "2", key="impostor")
    pair.passes(2.9, alive=["a", "b"])
    assert not pair.got("impostor", Welcome) and not pair.got("impostor", Refused)
    pair.passes(0.2, alive=["a", "b"])
    message = refused(pair, "impostor")
    assert message.slug == "duplicate-node"
    assert "10.0.0.1" in message.what and "10.0.0.3" in message.what
    assert pair.phase == "running"


def test_a_member_that_is_silent_for_less_than_the_limit_keeps_its_node_id(pair):
    pair.join("a", "2", key="impostor")
    pair.passes(2.8, alive=["b"])
    pair.passes(0.5, alive=["a", "b"])
    assert refused(pair, "impostor").slug == "duplicate-node"
    assert not pair.got("impostor", Welcome)
    assert pair.phase == "running"


def test_a_silent_agent_loses_its_node_id_to_a_new_agent_at_the_silence_limit(pair):
    pair.passes(1.5, alive=["b"])
    pair.join("a", "2", key="reborn")
    pair.passes(1.4, alive=["b"])
    assert not pair.got("reborn", Welcome)
    pair.passes(0.2, alive=["b"])
    assert pair.got("reborn", Welcome)
    assert pair.phase == "stopping"


def test_a_contest_sends_to_the_old_agent_so_that_a_restarted_host_resets_its_session(pair):
    pair.join("a", "2", key="reborn")
    assert pair.got("a", Alive)
    pair.breaks("a", clean=False)
    pair.passes(0.2, alive=["b"])
    assert pair.got("reborn", Welcome)


def test_a_member_whose_session_broke_keeps_its_node_id_if_it_returns_in_time(pair):
    pair.breaks("a", clean=False)
    pair.join("a", "2", key="impostor")
    pair.now_s += 0.05
    pair.join("a", holding=pair.holding("a"))
    pair.passes(3.2, alive=["a", "b"])
    assert refused(pair, "impostor").slug == "duplicate-node"
    assert pair.phase == "running" and len(pair.got("b", Assign)) == 1


def test_messages_sent_before_a_death_may_arrive_after_it(pair):
    pair.join("a", "2", key="reborn")
    pair.passes(2.8, alive=["a", "b"])
    pair.passes(3.1, alive=["b"])
    assert pair.got("reborn", Welcome) and not pair.got("reborn", Refused)


def test_messages_during_a_contest_are_kept_and_applied(pair):
    pair.join("a", "2", key="reborn")
    pair.says("reborn", Heartbeat())
    pair.says("reborn", Leave("SIGTERM"))
    assert pair.got("reborn", Alive)
    pair.passes(3.1, alive=["b"])
    pair.stops("b")
    assert pair.got("reborn", Release) and not pair.got("reborn", Assign)


def test_a_contest_ends_with_its_contestant(pair):
    pair.join("a", "2", key="reborn")
    pair.breaks("reborn")
    pair.passes(2.0, alive=["b"])
    assert not pair.got("reborn", Welcome) and not pair.got("reborn", Refused)


def test_a_contest_that_outlives_the_job_ends_with_a_refusal(pair):
    pair.join("a", "2", key="late")
    pair.succeeds("a", "b")
    pair.passes(2.0, alive=["b"])
    assert refused(pair, "late").slug in ("duplicate-node", "job-closed")
    assert not pair.got("late", Welcome)


def test_a_new_agent_replaces_a_disconnected_one_and_keeps_its_rank(pair):
    pair.breaks("a")
    pair.join("a", "2")
    pair.passes(0.2, alive=["a", "b"])
    pair.stops("b")
    assert pair.phase == "running"
    assert pair.ranks() == ["a", "b"]
    assert (pair.assigned["a"].fence.round, pair.assigned["a"].node_rank) == (2, 0)
    assert pair.machine.report().restarts_used == 0


def test_a_session_that_returns_within_its_grace_restarts_nothing(pair):
    pair.breaks("a")
    pair.now_s += 0.05
    pair.join("a", holding=pair.holding("a"))
    pair.passes(2.0, alive="ab")
    assert pair.phase == "running" and len(pair.got("b", Assign)) == 1


def test_an_agent_that_comes_back_without_its_workers_is_a_departure(pair):
    pair.breaks("a")
    pair.join("a")
    assert pair.phase == "stopping"
    pair.stops("b")
    assert pair.machine.report().restarts_used == 0


def test_a_query_is_answered_and_never_becomes_a_node(pair):
    pair.sessions["viewer"] = [99]
    pair.handle(Received(session=99, message=Query()))
    (report,) = pair.got("viewer", Report)
    assert (report.phase, report.world_size, len(report.nodes)) == ("running", 4, 2)
    assert [node.state for node in report.nodes] == ["running", "running"]
    assert [node.node_rank for node in report.nodes] == [0, 1]
