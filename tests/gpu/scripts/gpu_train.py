"""Training on a GPU with what GPU loops use; a digest of the weights is logged after each step.

Mixed precision with GradScaler, fused AdamW, dropout, a generator of the device, clipping, DDP.
Each step is a line in FOLDER/PID.jsonl. All stop after the step in which rank 0 finds
FOLDER/enough. A process that finds FOLDER/PID.hang takes it and starts a kernel that never ends.

    gpu_train.py FOLDER [compile] [hold=GIB] [save=WHERE]
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastane

SAMPLES, BATCH, SIZE, STEP_S = 1009, 32, 64, 0.02


def digest(net: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in net.state_dict().values():
        found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def spin(folder: Path, device: torch.device) -> None:
    """Occupy the device with a kernel that takes hours, if this process is told to."""
    told = folder / f"{os.getpid()}.hang"
    if told.exists():
        told.unlink()
        if device.type == "cpu":
            time.sleep(100_000)
        torch.cuda._sleep(1 << 45)


class Training:
    """The objects of the training, tracked."""

    def __init__(self, job: elastane.Job, is_compiled: bool) -> None:
        self.device = job.device
        self.is_cuda = job.device.type == "cuda"
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(SIZE, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, SIZE))
        self.net = net.to(self.device)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=self.is_cuda)
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=1024.0, growth_interval=50)
        self.noise = torch.Generator(self.device).manual_seed(5)
        job.track(net=net, optimizer=self.optimizer, scaler=self.scaler, noise=self.noise)
        model = DistributedDataParallel(net, process_group=job.process_group)
        self.model = torch.compile(model) if is_compiled else model
        data = torch.randn(SAMPLES, SIZE, generator=torch.Generator().manual_seed(1))
        batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=3)
        loader = torch.utils.data.DataLoader
        self.loader = loader(data, batch_sampler=batches, pin_memory=self.is_cuda)

    def backward(self, step: elastane.Step, host: torch.Tensor) -> None:
        batch = host.to(self.device, non_blocking=True)
        half = torch.float16 if self.is_cuda else torch.bfloat16
        drawn = torch.randn(batch.shape, generator=self.noise, device=self.device)
        with torch.autocast(self.device.type, dtype=half):
            loss = (self.model(batch) - batch.roll(1, 1) - 0.01 * drawn).square().mean()
        step.backward(self.scaler.scale(loss))

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def main() -> None:
    folder, options = Path(sys.argv[1]), dict(each.partition("=")[::2] for each in sys.argv[2:])
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end

    def say(what: str, step: int, **more: object) -> None:
        place = {"rank": job.rank, "world": job.world_size, "round": job.fence.round}
        at = {"what": what, "step": step, "at_s": time.monotonic()}
        log.write(json.dumps({**at, **place, **more}) + "\n")

    with elastane.init(backend=os.environ.get("GPU_BACKEND", "")) as job:
        if gib := float(options.get("hold", 0)):
            held = torch.empty(int(gib * 2**30), dtype=torch.uint8, device=job.device)
            say("holds", -1, bytes=held.numel())
        run = Training(job, "compile" in options)
        saver = elastane.Checkpointer(options["save"], every_steps=1) if "save" in options else None
        restored = saver.restore(job) if saver else None
        where = restored.where if restored else ""
        say("restored", restored.step if restored else 0, where=where, digest=digest(run.net))
        for step, _ in job.steps(run.loader, until_step=10**6):
            with step:
                enough = torch.tensor(float(job.rank == 0 and (folder / "enough").exists()))
                enough = enough.to(job.device)
                spin(folder, job.device)
                for batch in step.batches:
                    run.backward(step, batch)
                run.update()
                dist.all_reduce(enough, group=job.process_group)
            if step.committed:
                say("committed", step.number, digest=digest(run.net), scale=run.scaler.get_scale())
                if saver:
                    saver.maybe_save(step)
                if enough:
                    break
                time.sleep(STEP_S)
        if saver:
            saver.close()
        say("ended", job.committed, digest=digest(run.net))


if __name__ == "__main__":
    main()
