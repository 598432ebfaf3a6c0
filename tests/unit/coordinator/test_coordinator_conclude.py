"""An agent's user ends the job: in any phase, once, and durably before any agent learns of it."""

import pytest
from coordinator_driver import job_spec

from elastane.protocol.effects import Persist, Send
from elastane.protocol.messages import Assign, Close, Conclude
from elastane.protocol.model import JobRecord


def close(ok=False, reason="its restarts are used up"):
    return Conclude(ok=ok, reason=reason)


def test_a_conclusion_ends_a_running_job_for_all(pair):
    effects = pair.says("a", close())
    kinds = [type(effect) for effect in effects if isinstance(effect, (Persist, Send))]
    assert kinds == [Persist, Send, Send]
    for node in "ab":
        (told,) = pair.got(node, Close)
        assert not told.outcome.ok
        assert told.outcome.reason == "node a closed the job: its restarts are used up"
        assert (told.outcome.slug, told.outcome.exit_code) == ("rdzv-closed", 1)
    assert pair.persisted[-1].outcome == told.outcome


def test_a_successful_conclusion_exits_with_success(pair):
    pair.says("b", close(ok=True, reason="done"))
    outcome = pair.got("a", Close)[0].outcome
    assert outcome.ok and outcome.exit_code == 0


@pytest.mark.parametrize("phase", ["forming", "stopping", "draining"])
def test_a_conclusion_ends_a_job_in_any_phase(driver, phase):
    job = driver(job_spec(low=2, high=3))
    job.join("a")
    if phase != "forming":
        job.join("b")
        job.passes(4.0, alive="ab")
    if phase == "stopping":
        job.fails("b")
    if phase == "draining":
        job.join("c")
        job.passes(2.0, alive="abc")
    assert job.phase == phase
    job.says("a", close())
    assert job.phase == "closing"
    assert job.got("a", Close)


def test_the_first_conclusion_counts(pair):
    pair.says("a", close(reason="one"))
    pair.says("b", close(ok=True, reason="two"))
    assert pair.persisted[-1].outcome.reason.endswith("one")
    assert len(pair.got("b", Close)) == 1


def test_a_conclusion_waits_for_authority(driver):
    job = driver(job_spec(), store_backed=True)
    job.join("a")
    job.join("b")
    job.authority(False)
    job.says("a", close())
    assert not job.got("a", Close)
    job.authority(True)
    assert job.got("a", Close) and job.got("b", Close)


def test_a_candidate_may_conclude_the_job(driver):
    job = driver(job_spec())
    job.join("a")
    job.says("a", close())
    job.join("b")
    assert not job.got("a", Assign)
    assert isinstance(job.persisted[-1], JobRecord)
    assert job.persisted[-1].outcome is not None
