"""A job of one worker without a launcher: steps, refused uses, and rollback of a lost step.

Among the unit tests, which run in a process of their own: torch starts threads here, and tests of
real processes fork.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import elastane
from elastane.checkpoint.registered import RegisteredObjects
from elastane.errors import JobError
from elastane.worker.healing import Health
from elastane.worker.shard_plan import OwnChanges
from elastane.worker.undo import Undo

N, B = 100, 16
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))


def loader_of(samples=N, batch=B):
    batches = elastane.ElasticBatchSampler(samples, batch, seed=0)
    return torch.utils.data.DataLoader(range(samples), batch_sampler=batches)


def net_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )


@pytest.fixture
def job():
    with elastane.init() as made:
        yield made
    assert not torch.distributed.is_initialized()


def test_steps_of_a_job_of_one_are_those_of_a_plain_loop(job):
    nets = [net_of(), net_of()]
    sgd = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    job.track(net=nets[0], sgd=sgd[0])
    for step, chosen in job.steps(loader_of(), until_epoch=2):
        with step:
            step.backward(nets[0](X[chosen]).square().mean())
            sgd[0].step()
            sgd[0].zero_grad()
        assert step.committed
    plain = loader_of()
    for epoch in range(2):
        plain.batch_sampler.set_epoch(epoch)
        for chosen in plain:
            nets[1](X[chosen]).square().mean().backward()
            sgd[1].step()
            sgd[1].zero_grad()
    assert job.committed == 2 * 7 and (job.rank, job.world_size) == (0, 1)
    for ours, theirs in zip(*(net.state_dict().values() for net in nets), strict=True):
        assert torch.equal(ours, theirs)


def test_micro_batches_of_a_step_add_up_to_its_mean(job):
    nets = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    nets[1].load_state_dict(nets[0].state_dict())
    job.track(net=nets[0])
    for step, _ in job.steps(loader_of(batch=10), until_step=1, accumulate=3):
        with step:
            seen = []
            for chosen in step.batches:
                step.backward(nets[0](X[chosen]).square().mean())
                seen += chosen.tolist()
        assert step.samples == len(seen) == 10
    nets[1](X[seen]).square().mean().backward()
    torch.testing.assert_close(nets[0].weight.grad, nets[1].weight.grad)


def test_an_exception_of_the_body_is_raised_to_the_script(job):
    with pytest.raises(ZeroDivisionError):
        for step, _ in job.steps(loader_of(), until_step=3):
            with step:
                _ = 1 / 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda job: next(iter(job.steps(loader_of()))), "no end"),
        (lambda job: [0 for _ in job.steps(loader_of(), until_step=2)], "did not begin"),
        (lambda job: job.track(net=object()), "no state_dict"),
        (lambda job: [job.track(net=net_of()) for _ in range(2)], "one of this name"),
    ],
)
def test_invalid_uses_are_refused_with_an_explanation(job, wrong, words):
    with pytest.raises(JobError, match=words):
        wrong(job)


def test_calls_after_the_first_step_are_refused(job):
    for step, _ in job.steps(loader_of(), until_step=1):
        with step:
            pass
    with pytest.raises(JobError, match=r"job.steps\(\) came first"):
        job.track(net=net_of())
    with pytest.raises(JobError, match="another loader"):
        next(iter(job.steps(loader_of(), until_step=2)))


def test_track_after_restore_is_refused(job, tmp_path):
    job.track(net=net_of())
    with elastane.Checkpointer(tmp_path / "ck") as checkpointer:
        checkpointer.restore(job)
        first = r"checkpointer.restore\(job\) came first"
        with pytest.raises(JobError, match=first):
            job.track(other=net_of())
        with pytest.raises(JobError, match=first):
            elastane.Checkpointer(tmp_path / "other").restore(job)


def everything(net, optimizers, scheduler):
    tensors = [t.clone() for t in net.state_dict().values()]
    for optimizer in optimizers:
        state = optimizer.state_dict()["state"]
        tensors += [t.clone() for per in state.values() for t in per.values() if t is not None]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return tensors, [*rates, scheduler.last_epoch, *draws]


@pytest.mark.parametrize("stepped", [0, 1], ids=["none", "one-of-two"])
def test_a_lost_step_leaves_nothing_behind(stepped):
    net = net_of()
    halves = [torch.optim.AdamW(net[0].parameters()), torch.optim.AdamW(net[2].parameters())]
    scheduler = torch.optim.lr_scheduler.StepLR(halves[0], 1)
    generator = torch.Generator().manual_seed(5)
    tracked = RegisteredObjects()
    tracked.add({"net": net, "a": halves[0], "b": halves[1], "s": scheduler, "g": generator})
    undo = Undo(tracked)

    def begins(optimizer):
        undo.called(optimizer)
        undo.before_update(optimizer)

    for half in halves:
        half.register_step_pre_hook(lambda which, *_: begins(which))
        half.register_step_post_hook(lambda which, *_: undo.after_update(which))

    def body(count):
        net(X[:8] + torch.rand(8, 4, generator=generator)).square().mean().backward()
        for half in halves[:count]:
            half.step()

    undo.begin()
    body(2)
    assert undo.is_whole
    for half in halves:
        half.zero_grad()
    undo.begin()
    seen = [t.clone() for t in net.state_dict().values()], generator.get_state()
    streams = random.getstate(), torch.get_rng_state(), np.random.get_state()
    before = everything(net, halves, scheduler)
    random.setstate(streams[0]), torch.set_rng_state(streams[1])
    np.random.set_state(streams[2])
    body(stepped)
    scheduler.step()
    random.random(), torch.rand(3), np.random.rand()
    assert not undo.is_whole
    assert not all(map(torch.equal, seen[0], net.state_dict().values()))
    undo.restore()
    tensors, rest = everything(net, halves, scheduler)
    assert all(map(torch.equal, before[0], tensors)) and before[1] == rest
    assert torch.equal(seen[1], generator.get_state())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_buffer_replaced_in_a_failed_step_is_restored():
    net = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))
    net[0].register_buffer("average", torch.zeros(2))
    tracked = RegisteredObjects()
    tracked.add({"net": net, "half": net[1]})
    undo = Undo(tracked)
    for step in range(3):
        undo.begin()
        before = [buffer.clone() for buffer in net.buffers()]
        net(X[:8])
        net[0].average = net[0].average + 1
        net[0].average += 1
        undo.restore()
        assert all(map(torch.equal, before, net.buffers()))
        net[0].average = net[0].average + step


def test_a_scaler_can_unscale_again_in_a_retried_step():
    net = torch.nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    tracked = RegisteredObjects()
    tracked.add({"net": net, "optimizer": optimizer, "scaler": scaler})
    undo = Undo(tracked)
    for _ in range(2):
        undo.begin()
        scaler.scale(net(X).mean()).backward()
        scaler.unscale_(optimizer)
        undo.restore()


def test_a_worker_of_another_launcher_is_refused_instead_of_training_alone(monkeypatch):
    monkeypatch.delenv("ELASTANE_CONTROL_FD", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(JobError, match="WORLD_SIZE=4") as caught:
        elastane.init()
    assert caught.value.slug == "job-launcher"
    monkeypatch.setenv("WORLD_SIZE", "1")
    with elastane.init() as job:
        assert job.world_size == 1


def test_a_sharded_model_trains_in_a_job_of_one(job):
    from torch.distributed.fsdp import fully_shard

    mesh = job.device_mesh(shard=1)
    assert mesh.mesh_dim_names == ("replicate", "shard") and mesh.shape == (1, 1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    fully_shard(net, mesh=mesh)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    job.track(net=net, sgd=sgd)
    before = net[0].weight.full_tensor().clone()
    for step, chosen in job.steps(loader_of(), until_step=2):
        with step:
            step.backward(net(X[chosen]).square().mean())
            sgd.step()
            sgd.zero_grad()
        assert step.committed
    assert not net[0].weight.full_tensor().equal(before)


def test_shards_that_a_body_changes_itself_are_restored(job):
    """The evaluation before leaves the layer's parameters whole, in memory that is freed later."""
    from torch.distributed.fsdp import fully_shard

    net = torch.nn.Linear(4, 1)
    fully_shard(net, mesh=job.device_mesh(shard=1))
    sgd, tracked = torch.optim.SGD(net.parameters(), lr=0.1), RegisteredObjects()
    tracked.add({"net": net, "sgd": sgd})
    undo, weight = Undo(tracked), sgd.param_groups[0]["params"][0]
    with torch.no_grad():
        net(X)
    for is_made in (True, False):  # The first step shows what its body changes.
        undo.begin()
        before = weight.to_local().clone()
        net(X).mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.9)
        undo.called(sgd)
        if is_made:
            undo.before_update(sgd)
            undo.after_update(sgd)
    assert not weight.to_local().equal(before)
    assert undo.restore()
    assert weight.to_local().equal(before)


class Average:
    """An average of weights in an object that is no module, as some packages have it."""

    def __init__(self, parameters):
        self.mean = [each.detach().clone() for each in parameters]

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


def test_an_average_in_an_object_of_its_own_is_restored():
    net = torch.nn.Linear(4, 1)
    average, tracked = Average(net.parameters()), RegisteredObjects()
    tracked.add({"net": net, "average": average})
    undo = Undo(tracked)
    for value in (2.0, 3.0):
        for each in average.mean:
            each.fill_(value)
        undo.begin()
        for each in average.mean:
            each.fill_(7.0)
        assert undo.restore()
        assert all(each.eq(value).all() for each in average.mean)


def followed(*, before=False, inside=False, behind=False):
    """Return what an undo knows of two steps, whose code changes weights by itself."""
    net, average = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    sgd, tracked = torch.optim.SGD(net.parameters(), lr=0.1), RegisteredObjects()
    tracked.add({"net": net, "average": average, "sgd": sgd})
    undo = Undo(tracked)
    undo.follow()

    def change(is_wanted, module):
        with torch.no_grad():
            for each in module.parameters() if is_wanted else ():
                each.mul_(0.9)

    stuck = []
    for _ in range(2):
        undo.begin()
        net(X).mean().backward()
        change(before, net)
        stuck.append(undo.is_stuck)
        undo.called(sgd)
        undo.before_update(sgd)
        sgd.step()
        undo.after_update(sgd)
        change(inside, average)
        undo.committed()
        change(behind, average)
    known = undo.own_changes
    undo.begin()
    assert undo.own_changes is known  # until the next step is committed
    undo.healed()
    assert undo.own_changes is OwnChanges.NONE
    return known, stuck


def test_what_a_step_changes_without_an_optimizer_is_known():
    assert followed() == (OwnChanges.NONE, [False, False])
    assert followed(inside=True) == (OwnChanges.INSIDE, [False, False])
    assert followed(behind=True) == (OwnChanges.OUTSIDE, [False, False])
    # The first step has no copies of what its body changes before the update.
    assert followed(before=True) == (OwnChanges.NONE, [True, False])


def test_a_committed_sharded_step_survives_a_new_world(job):
    from torch.distributed.fsdp import fully_shard

    from elastane.worker.shard_healing import Shards

    net = torch.nn.Linear(4, 1)
    fully_shard(net, mesh=job.device_mesh(shard=1))
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    halved = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    job.track(net=net, sgd=sgd, halved=halved)
    mesh, health = job._world.mesh, job._health
    for step, chosen in job.steps(loader_of(), until_step=2):
        health.shards = Shards(job.process_group, mesh, health, job._undo, came_later=False)
        with step:
            step.backward(net(X[chosen]).square().mean())
            sgd.step()
            halved.step()
    health.compare(job._feed.cursor)
    assert sgd.param_groups[0]["lr"] == 0.25 and halved.last_epoch == 2


def test_a_worker_that_joined_a_job_whose_state_is_lost_does_not_begin_again(job):
    """It skipped its checkpoint, because another member was to give it the state."""
    net = torch.nn.Linear(4, 1)
    job.track(net=net, sgd=torch.optim.SGD(net.parameters(), lr=0.1))
    next(job.steps(loader_of(), until_step=2))
    started, joined = (Health(job.process_group, job._tracked) for _ in range(2))
    started.compare(job._feed.cursor)
    joined.prepare()
    with pytest.raises(JobError, match="no worker of this world holds the state"):
        joined.compare(job._feed.cursor)


def test_a_sharded_model_excludes_uses_that_need_whole_replicas():
    from torch.distributed.fsdp import fully_shard

    with elastane.init(deterministic=True) as job:
        net = torch.nn.Linear(4, 1)
        fully_shard(net, mesh=job.device_mesh(shard=1))
        with pytest.raises(JobError, match="deterministic=True, with parameters that are sharded"):
            job.track(net=net)
    with elastane.init() as job:
        net = torch.nn.Linear(4, 1)
        fully_shard(net, mesh=job.device_mesh(shard=1))
        job.track(net=net, sgd=torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(JobError, match="verify_every"):
            next(job.steps(loader_of(), until_step=2, verify_every=1))


def test_a_mesh_that_does_not_divide_the_world_is_refused(job):
    with pytest.raises(JobError, match=r"shard=2\) in a world of 1 workers"):
        job.device_mesh(shard=2)


def test_a_mesh_with_different_sizes_on_workers_is_refused(job, monkeypatch):
    others = "elastane.worker.world.gathered"
    monkeypatch.setattr(others, lambda group, said: [said, [*said[:2], 2, said[3]]])
    with pytest.raises(JobError, match=r"called with 1, 2, by rank"):
        job.device_mesh(shard=1)


def test_a_job_has_one_mesh(job):
    job.device_mesh(shard=1)
    with pytest.raises(JobError, match="called before"):
        job.device_mesh(shard=1)


def test_a_joining_worker_uses_no_collective_before_its_first_step(job):
    mesh = job.device_mesh(shard=1)
    groups = [job.process_group, mesh.get_group("shard"), mesh.get_group("replicate")]
    job._world._set_apart(True)  # as a joining worker that has just received its place
    for group in groups:
        torch.distributed.barrier(group=group)
        with pytest.raises(JobError, match=r"before job\.steps") as caught:
            torch.distributed.all_reduce(torch.ones(1), group=group)
        assert caught.value.slug == "job-early"
    job._world.begin()
    for group in groups:
        torch.distributed.all_reduce(torch.ones(1), group=group)


def test_a_ddp_with_a_stateful_hook_is_refused(job):
    net = torch.nn.Linear(4, 1)
    model = torch.nn.parallel.DistributedDataParallel(net, process_group=job.process_group)
    state = powerSGD_hook.PowerSGDState(process_group=job.process_group)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    job.track(net=net)
    with pytest.raises(JobError, match=r"PowerSGDState.*\[job-ddp\]"):
        next(job.steps(loader_of(), until_step=1))


def test_torchs_fp16_hook_of_cpp_is_replaced_by_that_of_python(job):
    net = torch.nn.Linear(4, 1)
    model = torch.nn.parallel.DistributedDataParallel(net, process_group=job.process_group)
    model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    assert model._comm_hooks == [(default_hooks.fp16_compress_hook, job.process_group)]


def test_every_attribute_of_a_job_and_of_a_step_is_documented(job):
    page = (Path(__file__).parents[3] / "docs" / "in-place-reference.md").read_text()
    step, _ = next(job.steps(loader_of(), until_step=1))
    for name, thing in (("job", job), ("step", step)):
        public = {each for each in dir(thing) if not each.startswith("_")}
        assert not {each for each in public if f"`{name}.{each}" not in page}


def test_a_compiled_ddp_trains_as_an_eager_one_does(job):
    """A backend that compiles nothing is enough, since only the tracing meets the process group."""
    nets = [torch.nn.Linear(4, 1) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    eager, traced = (DistributedDataParallel(net, process_group=job.process_group) for net in nets)
    compiled = torch.compile(traced, backend="eager")
    for forward in (eager, compiled):
        for _ in range(2):
            forward(X).square().mean().backward()
    for found, expected in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
