"""`job.retry`: where it is allowed, and how survivors and joining workers agree. Pure."""

from __future__ import annotations

import pytest
import torch

import elastane
from elastane.errors import JobError
from elastane.worker.retry import Before, Calls


def loader_of():
    batches = elastane.ElasticBatchSampler(100, 16, seed=0)
    return torch.utils.data.DataLoader(range(100), batch_sampler=batches)


@pytest.fixture
def job():
    with elastane.init() as made:
        yield made


def test_a_guarded_call_returns_its_value_after_a_step_and_between_loops_and_nowhere_else(job):
    def inside(of):
        with pytest.raises(JobError, match=of) as caught:
            job.retry(len, "abc")
        assert caught.value.slug == "job-retry"

    loader = loader_of()
    inside("before the first")
    for step, _ in job.steps(loader, until_step=2):
        with step:
            inside("inside of `with step:`")
        assert job.retry(lambda: job.retry.__name__) == "retry"
        assert job.retry(sorted, [2, 1], reverse=True) == [2, 1]
    assert job.retry(len, "abc") == 3
    job.retry(inside, "inside of another")
    with pytest.raises(ZeroDivisionError):
        job.retry(lambda: 1 / 0)
    assert job.retry(len, "ab") == 2


def meet(monkeypatch, *members):
    """Let these members of a new world learn of one another's calls."""
    said = [each.encoded() for each in members]
    monkeypatch.setattr("elastane.worker.retry.gathered", lambda group, mine: said)
    for each in members:
        each.meet()


def member(loops=1, kind="between"):
    calls = Calls(None)
    for _ in range(loops):
        calls.loop_ended()
    if kind == "after":
        calls.after_step()
    return calls


def test_a_call_completed_by_one_survivor_is_completed_for_all(monkeypatch):
    for kind in ("between", "after"):
        done, late = member(kind=kind), member(kind=kind)
        first, second = done.begin("f", 4), late.begin("f", 4)
        first.ran = second.ran = True
        meet(monkeypatch, done, late)
        assert not first.is_over and not second.is_over
        assert done.callers() == late.callers() == [0, 1]
        done.complete(first)
        done.end()
        second.value = 7
        meet(monkeypatch, done, late)
        assert second.is_over and second.value == 7


def test_a_joining_worker_takes_part_between_loops_and_has_the_earlier_values(
    monkeypatch,
):
    old, new = member(loops=2), member(loops=0)
    earlier = old.begin("f", 4)
    earlier.ran, earlier.value = True, 0.5
    old.complete(earlier)
    old.end()
    now = old.begin("g", 4)
    meet(monkeypatch, old, new)
    assert old.callers() == [0] and not now.is_over
    new.load_state_dict(old.state_dict())
    new.loop_ended()
    with pytest.raises(JobError, match="is not kept"):
        new.begin("f", 0)  # that of the first loop, whose value nobody told
    new.loop_ended()
    found = new.begin("f", 4)
    assert found.is_over and found.value == 0.5
    assert new.begin("g", 4).place == now.place


def test_a_rerun_begins_as_the_first_run_did(job):
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout())
    job.track(net=net)
    before = Before(job._tracked, job.process_group)
    first = net(torch.ones(4, 2)), torch.rand(3)
    net.eval()
    before.restore()
    assert net.training and net[1].training and not net[0].running_mean.any()
    assert torch.equal(first[0], net(torch.ones(4, 2))) and torch.equal(first[1], torch.rand(3))
