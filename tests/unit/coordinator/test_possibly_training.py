"""A wait for unreachable state holders does not shorten the time that nodes have to join."""

from coordinator_driver import Driver, job_spec
from test_in_place_recovery import able, kinds, regrouped
from test_state_holders import unheard

from elastane.protocol.effects import Persist, Send
from elastane.protocol.limits import Timing
from elastane.protocol.messages import Prepare, Release, Stopped
from elastane.protocol.model import Fence, PortOffer

JOIN_S = 40.0
assert Timing().fence_wait_s > JOIN_S


def spec():
    return job_spec(2, 2, timing={"join_timeout_s": JOIN_S})


def in_doubt():
    job = unheard(spec=spec())
    assert job.machine.phase == "regrouping" and "may hold the state" in job.machine.report().reason
    return job


def test_an_arrival_prepares_while_unreachable_state_holders_are_awaited():
    job = in_doubt()
    job.join("d")
    assert kinds(job, "d")[-1] is Prepare
    job.passes(Timing().fence_wait_s, alive="cd")
    able(job, "d")
    assert regrouped(job, "d") == (Fence(3, 0), 2, (0, 1), 4)


def test_join_timeout_starts_after_the_wait_for_state_holders():
    job = in_doubt()
    job.passes(Timing().fence_wait_s + JOIN_S / 2, alive="c")
    assert job.machine.phase == "regrouping"
    job.join("d")
    able(job, "d")
    assert regrouped(job, "d") == (Fence(3, 0), 2, (0, 1), 4)


def test_join_timeout_is_not_extended_further():
    job = in_doubt()
    job.passes(Timing().fence_wait_s + JOIN_S + 5.0, alive="c")
    assert job.persisted[-1].outcome.slug == "rdzv-timeout"


def test_join_timeout_starts_after_the_wait_without_any_member_left():
    job = Driver(spec(), store_backed=True)
    job.join("a"), job.join("b")
    assert job.ranks() == ["a", "b"]
    after = Driver(job.spec, job.persisted[-1], store_backed=True)
    after.join("c")
    after.passes(5.0, alive="c")
    assert "no node of the last world can be reached" in after.machine.report().reason
    after.passes(Timing().fence_wait_s + JOIN_S / 2, alive="c")
    assert after.machine.phase == "forming"
    after.join("d")
    after.passes(1.0, alive="cd")
    assert after.assigned["c"].fence == Fence(2, 0)


def all_left():
    """Return a job of a, b and c, whose nodes all leave; the coordinator ends with them."""
    job = Driver(job_spec(1, 3), store_backed=True)
    for name in "abc":
        job.join(name)
    for name in "abc":
        job.leaves(name)
    for name in "abc":
        job.marks(name, None)
    for name in "abc":
        job.drains(name)
    job.stops(*"abc")
    assert [len(job.got(name, Release)) for name in "abc"] == [1, 1, 1]
    return job


def test_a_job_whose_nodes_were_all_released_starts_at_once_on_other_nodes():
    job = all_left()
    after = Driver(job.spec, job.persisted[-1], store_backed=True)
    after.join("d")
    after.passes(4.0, alive="d")
    assert after.assigned["d"].fence == Fence(2, 0)
    assert not after.persisted[-1].over, "a world is in force again"


def test_the_record_is_durable_before_the_last_release():
    job = Driver(job_spec(1, 1), store_backed=True)
    job.join("a")
    job.leaves("a")
    job.drains("a")
    effects = job.says("a", Stopped(job.assigned["a"].fence, PortOffer(9000, True)))
    order = [type(e.message) if isinstance(e, Send) else type(e) for e in effects]
    assert order.index(Persist) < order.index(Release)
    assert job.persisted[-1].over


def test_a_new_coordinator_waits_for_workers_that_went_out_of_sight():
    job = in_doubt()
    job.leaves("c")
    job.passes(5.0, alive="c")
    job.stops("c")
    assert job.got("c", Release) and not job.persisted[-1].over
    after = Driver(job.spec, job.persisted[-1], store_backed=True)
    after.join("d"), after.join("e")
    after.passes(30.0, alive="de")
    assert "d" not in after.assigned
