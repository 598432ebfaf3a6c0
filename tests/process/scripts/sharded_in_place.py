"""Training with fully_shard() as a job: over SHARD workers a replica; 0: over all that there are.

    sharded_in_place.py FOLDER SHARD STEP_S WHERE [CUT]

Each process appends to FOLDER/PID.jsonl what it restored and each step. All stop after the step in
which one finds FOLDER/enough, train as many steps again as plain torch would, and leave
FOLDER/PID.final: digests of what both have come to, and how far apart those are. Where WHERE is not
empty they save. In step CUT, once, the workers of coordinates 0 and 2 make their last update, the
worker of coordinate 1 does not come to it, and the worker of coordinate 3 is killed. OPTIMIZERS=2
trains the first layer by one of its own, and all wait for one another before the second one steps.
With LATE=1 all make the update of step CUT, and worker 1 is cut off before its schedulers step.
With LATE=2 the others are cut off after theirs have stepped. AVERAGE says where a step changes an
average of the weights: "inside" or "behind" its body.
With DECAYS=1 the body decays the weights itself before the update, and an evaluation comes first.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import elastane

WIDTH, BATCH = 24, 16
LATE = int(os.environ.get("LATE", "0"))
AVERAGE = os.environ.get("AVERAGE", "")
DECAYS = os.environ.get("DECAYS") == "1"
torch.set_num_threads(1)
# What worlds of other sizes round otherwise is to stay small, for thousands of steps.
torch.set_default_dtype(torch.float64)


class Training:
    """A model whose shards have unequal sizes, its optimizers and its data."""

    def __init__(self, mesh) -> None:
        self.device = mesh.device_type
        self.net = sharded_net(mesh)
        self.average = sharded_net(mesh) if AVERAGE else None
        parts = [self.net.parameters()]
        if os.environ.get("OPTIMIZERS") == "2":
            parts = [
                self.net[0].parameters(),
                [*self.net[2].parameters(), *self.net[3].parameters()],
            ]
        self.optimizers = [torch.optim.AdamW(part, lr=1e-2) for part in parts]
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(each, step_size=3, gamma=0.99)
            for each in self.optimizers
        ]
        self.data = torch.randn(1008, WIDTH, generator=torch.Generator().manual_seed(1))
        self.batches = elastane.ElasticBatchSampler(len(self.data), BATCH, seed=3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch.to(self.device)).pow(2).mean()

    def update(self, group=None) -> None:
        for number, optimizer in enumerate(self.optimizers):
            if number and group is not None:
                dist.all_reduce(torch.ones(1), group=group)
            optimizer.step()
        if group is not None:
            self.after_update(group)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            scheduler.step()
            optimizer.zero_grad()
        if group is not None:
            self.after_schedulers(group)

    def after_update(self, group) -> None:
        """Make the collective of the body that comes after the update; there is none at first."""

    def after_schedulers(self, group) -> None:
        """Make the last collective of the body; there is none at first."""

    def put_into_average(self, where: str) -> None:
        if self.average is None or where != AVERAGE:
            return
        with torch.no_grad():
            for mean, own in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mean.to_local().lerp_(own.to_local(), 0.1)

    def tracked(self) -> dict[str, object]:
        found = {"net": self.net} | ({"average": self.average} if AVERAGE else {})
        for number, optimizer in enumerate(self.optimizers):
            found |= {
                f"optimizer{number}": optimizer,
                f"scheduler{number}": self.schedulers[number],
            }
        return found

    def result(self) -> torch.Tensor:
        parameters = [*self.net.parameters()]
        states = {p: state for each in self.optimizers for p, state in each.state.items()}
        moments = [states[p]["exp_avg_sq"] for p in parameters]
        averages = [*self.average.parameters()] if AVERAGE else []
        every = parameters + moments + averages
        return torch.cat([e.full_tensor().detach().flatten() for e in every])

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        if DECAYS:
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.mul_(0.999)


def sharded_net(mesh) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, 37), torch.nn.Tanh(), torch.nn.LayerNorm(37)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(37, 5))
    for layer in (net[0], net[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def digest(result: torch.Tensor) -> str:
    return hashlib.sha256(result.cpu().numpy().tobytes()).hexdigest()


def plain(mesh, steps: int) -> torch.Tensor:
    """Return the result of plain training, in the last world."""
    run = Training(mesh)
    size = dist.get_world_size(mesh.get_group("replicate")) * mesh.size(1)
    row, column = dist.get_rank(mesh.get_group("replicate")), mesh.get_local_rank("shard")
    run.batches.bind(row * mesh.size(1) + column, size)
    while run.batches.next_step < steps:
        for samples in run.batches:
            if run.batches.next_step < steps:
                weight = len(samples) * size / BATCH  # shares of a world of six are unequal
                (run.forward(run.data[samples]) * weight).backward()
                run.clip()
                run.update()
                run.put_into_average(AVERAGE)
                run.batches.commit()
    return run.result()


def cut_at(folder: Path, number: int, now: dict[str, object]) -> None:
    from elastane.worker.shard_healing import Agreement, Shards

    agree = Shards.agree

    def cut(self, optimizer) -> None:
        agree(self, optimizer)
        is_there = now["step"] == number and optimizer is now["last"]
        if not is_there or (folder / "cut").exists():
            return
        (folder / f"there-{self._mesh.coordinate}").touch()
        if self._mesh.coordinate == 3:
            while len([*folder.glob("there-*")]) < 4:
                time.sleep(0.001)
            (folder / "cut").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._mesh.coordinate == 1:
            self._agreement = Agreement.READY
            while not self._group.failed:
                time.sleep(0.001)
            self._group.check()

    Shards.agree = cut


class CutShort:
    """Lets three workers make a collective after the update of a step, and one not see its end.

    With LATE=2 the other two do not see the end of the next one, after the schedulers.
    """

    def __init__(self, folder: Path, number: int, now: dict[str, object], job: elastane.Job):
        self._folder, self._number, self._now, self._job = folder, number, now, job
        places = {"after_update": (0, 1, 2, 3), "after_schedulers": ()}
        if LATE == 2:
            places = {"after_update": (1, 3), "after_schedulers": (0, 2)}
        for name, coordinates in places.items():
            setattr(Training, name, self._at(coordinates))

    def _at(self, coordinates: tuple[int, ...]):
        def collective(_run, group) -> None:
            coordinate = self._job._world.mesh.coordinate
            is_there = self._now["step"] == self._number and coordinate in coordinates
            if is_there and not (self._folder / "cut").exists():
                (self._folder / f"there-{coordinate}").touch()
                self._make(group, coordinate)

        return collective

    def _make(self, group, coordinate: int) -> None:
        if coordinate == 3:
            while len([*self._folder.glob("there-*")]) < 4:
                time.sleep(0.001)
            (self._folder / "cut").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if coordinate == 1 or LATE == 2:
            while not group.failed:
                time.sleep(0.001)
            group.check()


def main() -> None:
    folder, shard, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    where, now = sys.argv[4], {"step": -1}
    cut = int(sys.argv[5]) if len(sys.argv) > 5 else -1
    if cut >= 0 and not LATE:
        cut_at(folder, cut, now)
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end

    def say(what: str, step: int, **more: object) -> None:
        place = {"rank": job.rank, "world": job.world_size, "round": job.fence.round}
        at = {"at_s": time.monotonic(), **more}
        log.write(json.dumps({"what": what, "step": step, **place, **at}) + "\n")

    with elastane.init(backend=os.environ.get("GPU_BACKEND", "")) as job:
        mesh = job.device_mesh(shard=shard or job.world_size)
        if LATE:
            CutShort(folder, cut, now, job)
        run = Training(mesh)
        now["last"] = run.optimizers[-1]
        loader = torch.utils.data.DataLoader(run.data, batch_sampler=run.batches)
        job.track(**run.tracked())
        saver = elastane.Checkpointer(where, every_steps=2) if where else None
        restored = saver.restore(job) if saver else None
        if DECAYS and job.fence.round == 1:
            with torch.no_grad():
                run.forward(run.data)  # which leaves the parameters of the outer module whole
        say("restored", restored.step if restored else 0, where=restored and restored.where)
        for step, batch in job.steps(loader, until_step=10**6):
            with step:
                now["step"] = step.number
                say("body", step.number)
                step.backward(run.forward(batch))
                run.clip()
                enough = torch.tensor(float((folder / "enough").exists()))
                time.sleep(step_s)
                dist.all_reduce(enough, group=job.process_group)
                run.update(job.process_group)
                run.put_into_average("inside")
            if step.committed:
                run.put_into_average("behind")
                say("committed", step.number)
                if saver:
                    saver.maybe_save(step)
                if enough:
                    break
        if saver:
            saver.wait()
            saver.close()
        found, undisturbed = run.result(), plain(mesh, job.committed)
        found = {
            "steps": job.committed,
            "found": digest(found),
            "plain": digest(undisturbed),
            "apart": (found - undisturbed).abs().max().item(),
        }
        (folder / f"{os.getpid()}.final").write_text(json.dumps(found))
        dist.barrier(group=job.process_group)


if __name__ == "__main__":
    main()
