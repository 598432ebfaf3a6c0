"""deterministic=True in a job of one: the effect of a step's shards, and refused uses.

Among the unit tests, which run in a process of their own: torch starts threads here, and tests of
real processes fork.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import elastane
from elastane.errors import ConfigurationError, JobError

N, B, SHARDS = 50, 12, 4
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))


def loader_of(samples=N, batch=B):
    batches = elastane.ElasticBatchSampler(samples, batch, seed=0)
    return torch.utils.data.DataLoader(range(samples), batch_sampler=batches)


@pytest.fixture
def job():
    with elastane.init(deterministic=True, shards=SHARDS, seed=3) as made:
        assert torch.are_deterministic_algorithms_enabled()
        yield made
    assert not torch.are_deterministic_algorithms_enabled()


def steps_of(job, net, count=1, loader=None, **more):
    """Yield each step inside its body, with an optimizer that is tracked."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job.track(net=net, optimizer=optimizer)
    for step, _ in job.steps(loader or loader_of(), until_step=count, **more):
        with step:
            yield step, optimizer


def test_unequal_shards_give_the_gradient_of_the_mean_over_the_global_batch(job):
    net, seen = torch.nn.Linear(4, 1), []
    for step, optimizer in steps_of(job, net, count=5):  # the last has 2 samples for 4 shards
        seen = []
        for chosen in step.batches:
            assert net.weight.grad is None
            step.backward(net(X[chosen]).square().mean())
            seen += chosen.tolist() if step.weight else []
        plain = torch.nn.Linear(4, 1)
        plain.load_state_dict(net.state_dict())
        plain(X[seen]).square().mean().backward()
        torch.testing.assert_close(net.weight.grad, plain.weight.grad)
        assert step.samples == len(seen) == (B if step.number < 4 else 2)
        optimizer.step()
        optimizer.zero_grad()


def test_micro_batches_are_more_shards(job):
    net = torch.nn.Linear(4, 1)
    for step, _ in steps_of(job, net, accumulate=3):
        assert len([*step.batches]) == 3 * SHARDS


def test_existing_gradients_accumulate_and_untouched_ones_stay_none(job):
    net, unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    job.track(unused=unused)
    for step, _ in steps_of(job, net):
        for _ in range(2):
            for chosen in step.batches:
                step.backward(net(X[chosen]).mean())
        twice = net.weight.grad
        net.weight.grad = None
        for chosen in step.batches:
            step.backward(net(X[chosen]).mean())
        torch.testing.assert_close(twice, 2 * net.weight.grad)
        assert unused.weight.grad is None


def test_gradients_have_no_negative_zero(job):
    net = torch.nn.Linear(4, 1)
    for step, _ in steps_of(job, net):
        for _ in step.batches:
            step.backward((net.weight * -0.0).sum())
        assert not net.weight.grad.any() and not net.weight.grad.signbit().any()


def test_buffers_become_the_mean_of_the_shards_and_constant_ones_stay_to_the_bit(job):
    net = torch.nn.BatchNorm1d(4)
    constant = torch.tensor([0.1, -float("inf"), 1e30])
    net.register_buffer("constant", constant.clone())
    net.register_buffer("at_random", torch.zeros(1))
    for step, _ in steps_of(job, net):
        each = []
        for chosen in step.batches:
            assert not net.running_mean.any() and not net.num_batches_tracked
            step.backward(net(X[chosen]).square().mean())
            each.append(net.running_mean.clone())
        torch.testing.assert_close(net.running_mean, torch.stack(each).mean(dim=0))
        assert net.num_batches_tracked == 1
        assert torch.equal(net.constant, constant)


def test_a_replaced_buffer_counts_as_changed(job):
    net, shared = torch.nn.Linear(4, 1), torch.zeros(2)
    for name in ("replaced", "changed", "shared"):
        net.register_buffer(name, shared if name == "shared" else torch.zeros(2))
    net.inner = torch.nn.Module()
    net.inner.register_buffer("shared", shared)
    before = dict(net.named_buffers())
    for step, _ in steps_of(job, net, count=3):
        for number, chosen in enumerate(step.batches):
            net.replaced = 0.9 * net.replaced + number
            net.inner.shared = 0.9 * net.inner.shared + number
            net.changed.mul_(0.9).add_(number)
            step.backward(net(X[chosen]).mean())
        assert torch.equal(net.replaced, net.changed) and torch.equal(net.shared, net.changed)
    assert all(each is before[name] for name, each in net.named_buffers())
    assert net.inner.shared is shared


def test_each_shard_seeds_its_own_streams_and_tracked_generators(job):
    generator, net = torch.Generator(), torch.nn.Linear(4, 1)
    job.track(generator=generator)
    drawn = []
    for step, _ in steps_of(job, net, count=2):
        for _ in range(2):
            for _ in step.batches:
                drawn += [float(torch.rand(())), float(torch.rand((), generator=generator))]
                drawn += [random.random(), float(np.random.rand())]
    assert len(set(drawn)) == len(drawn) == 2 * 2 * SHARDS * 4


def test_init_seeds_the_model_that_is_built_after_it():
    nets = []
    for seed in (5, 5, 6):
        torch.rand(7)
        with elastane.init(deterministic=True, seed=seed):
            nets.append(torch.nn.Linear(3, 3).weight)
    assert torch.equal(nets[0], nets[1]) and not torch.equal(nets[0], nets[2])


def test_collectives_are_allowed_after_a_failed_body(job):
    job.track(net=torch.nn.Linear(4, 1))
    with pytest.raises(ZeroDivisionError):
        for step, _ in job.steps(loader_of(), until_step=1):
            with step:
                for _ in step.batches:
                    _ = 1 / 0
    torch.distributed.barrier(group=job.process_group)


def only_the_first(step, net, optimizer):
    for chosen in step.batches:
        step.backward(net(X[chosen]).mean())
        optimizer.step()


def none_of_them(step, net, optimizer):
    net(X).mean().backward()
    optimizer.step()


def all_before_any(step, net, optimizer):
    for chosen in [*step.batches]:
        step.backward(net(X[chosen]).mean())
    optimizer.step()


def a_buffer_that_grows(step, net, optimizer):
    for chosen in step.batches:
        net.register_buffer("seen", torch.cat([net.seen, X[chosen]]))
        step.backward(net(X[chosen]).mean())


def a_collective_inside(step, net, optimizer):
    for chosen in step.batches:
        torch.distributed.all_reduce(net(X[chosen]).mean().detach())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (only_the_first, "after 1 of this rank's 4 shards"),
        (none_of_them, "shards were not computed"),
        (all_before_any, "no shard has left a gradient"),
        (a_buffer_that_grows, "the buffer seen of a Linear has another shape"),
        (a_collective_inside, "allreduce was called inside a shard"),
    ],
)
def test_a_body_that_depends_on_the_world_is_refused(job, body, words):
    net = torch.nn.Linear(4, 1)
    net.register_buffer("seen", torch.zeros(0, 4))
    with pytest.raises(JobError, match=words):
        for step, optimizer in steps_of(job, net):
            body(step, net, optimizer)


def ddp_of(job, net):
    ddp = torch.nn.parallel.DistributedDataParallel
    return ddp(net, process_group=job.process_group, init_sync=False)


def test_a_ddp_made_without_a_first_sync_reduces_nothing_by_itself(job):
    net = torch.nn.Linear(4, 1)
    model = ddp_of(job, net)
    for step, _ in steps_of(job, net):
        for chosen in step.batches:
            step.backward(model(X[chosen]).mean())
        assert net.weight.grad is not None


def sparse(job):
    net = torch.nn.Embedding(N, 4, sparse=True)
    for step, _ in steps_of(job, net):
        for chosen in step.batches:
            step.backward(net(chosen).mean())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (sparse, "layout torch.sparse"),
        (lambda job: [*steps_of(job, torch.nn.SyncBatchNorm(4))], "1 of SyncBatchNorm"),
        (lambda job: [*job.steps(loader_of(), until_step=1)], "nothing is tracked"),
        (
            lambda job: [*steps_of(job, torch.nn.Linear(4, 1), loader=loader_of(batch=3))],
            "global_batch_size is 3, and a step is cut into 4",
        ),
        (lambda job: job.mode.insist_on_world(SHARDS + 1), "5 workers, and there are 4 shards"),
    ],
    ids=["sparse", "sync", "untracked", "small", "world"],
)
def test_world_dependent_configurations_are_refused_with_an_explanation(job, wrong, words):
    with pytest.raises(JobError, match=words):
        wrong(job)


@pytest.mark.parametrize("wrong", [{"shards": 0}, {"seed": -1}, {"shards": 2.0}])
def test_shards_and_seed_are_whole_numbers(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        elastane.init(deterministic=True, **wrong)
