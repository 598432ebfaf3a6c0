"""An Accelerate script with an adopted accelerator, so that workers join it in place.

Usage: joining_accelerate.py FOLDER [MODE]. It ends at the end of an epoch after a file "enough" is
there. It writes what it has after each step and each evaluation. The process of a file PID.hold-X
makes PID.held-X when it comes to X, and waits to be killed: X is train, last (the
last step of an epoch), evaluate, gather, save or log. MODE:

- plain: nothing else
- accumulate: two batches to a step, in bfloat16, with clipping
- stream: as plain, of shards whose lengths are not known
- resume: as plain, from the newest state that was saved
- unnamed: a second optimizer is not prepared
- unsynchronised: two batches to a step, without accumulate()
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader, Dataset

import elastane
from elastane.data import sources

FOLDER, MODE = Path(sys.argv[1]), "".join(sys.argv[2:]) or "plain"
SAMPLES, BATCH, EVALUATED = 240, 24, 50
STEPS = SAMPLES // BATCH
EPOCHS_MAX = 10_000
# In the middle of an epoch.
SAVE_EVERY = 25


class Numbers(Dataset):
    """Samples that are functions of their index."""

    def __init__(self, length):
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return index, torch.randn(16, generator=torch.Generator().manual_seed(index))


def data():
    """Return the training data, as an adopted accelerator prepares them."""
    numbers = Numbers(SAMPLES)
    if MODE == "stream":
        shards = [range(50), range(50, 50), range(50, 51), range(51, 141), range(141, SAMPLES)]

        def opened(shard, start, _epoch):
            return (numbers[index] for index in shard[start:])

        return elastane.ElasticStream(sources.ShardSource(shards, opened), BATCH, seed=1)
    return DataLoader(numbers, batch_sampler=elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=1))


class Average:
    """An average of all weights, and how many steps it is over."""

    def __init__(self, model):
        self.steps = 0
        self.weights = [torch.zeros_like(each) for each in model.parameters()]

    def add(self, model):
        """Add the weights after a step."""
        self.steps += 1
        for mean, each in zip(self.weights, model.parameters(), strict=True):
            mean.lerp_(each.detach(), 0.1)

    def state_dict(self):
        return {"steps": self.steps, "weights": self.weights}

    def load_state_dict(self, state):
        self.steps, self.weights = state["steps"], state["weights"]


class Lines(GeneralTracker):
    """A tracker that has to be started, and that appends to one file of the job."""

    name, requires_logging_directory = "lines", False
    _file = None

    @property
    def tracker(self):
        return self._file

    def start(self):
        if torch.distributed.get_rank() == 0:
            self._file = (FOLDER / "tracked.txt").open("a")

    def log(self, values, step=None, **kwargs):
        if torch.distributed.get_rank() == 0:
            hold("log")
            self._file.write(json.dumps({"epoch": step, "by": os.getpid(), **values}) + "\n")
            self._file.flush()


def hold(where):
    """Wait to be killed, if the test asks for it."""
    if (FOLDER / f"{os.getpid()}.hold-{where}").exists():
        (FOLDER / f"{os.getpid()}.held-{where}").touch()
        signal.pause()


def hold_in_gathers():
    """Let a worker wait to be killed within an all-gather, which the others have begun."""
    sums = torch.distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        hold("gather")
        return sums(tensor, *args, **kwargs)

    torch.distributed.all_reduce = all_reduce


def digest(model, optimizer, average):
    """Return a digest of all parameters, moments and averages."""
    tensors = [*model.state_dict().values(), *average.weights]
    for state in optimizer.state_dict()["state"].values():
        tensors += [each for each in state.values() if isinstance(each, torch.Tensor)]
    return hashlib.sha1(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def made():
    """Return a model."""
    inner = torch.nn.LayerNorm(32), torch.nn.ReLU()
    return torch.nn.Sequential(torch.nn.Linear(16, 32), *inner, torch.nn.Linear(32, 1))


def loss_of(model, inputs):
    """Return the mean loss of a batch."""
    return (model(inputs).squeeze(-1) - inputs.sum(1)).square().mean()


def any_has(accelerator, name):
    """Whether a file is there; all ranks decide alike."""
    return bool(accelerator.gather(torch.tensor([int((FOLDER / name).exists())])).max())


def evaluated(accelerator, model, loader):
    """Return the indices of the samples that all workers together have evaluated."""
    seen = []
    for indices, inputs in loader:
        hold("evaluate")
        with torch.no_grad():
            model(inputs)
        seen += accelerator.gather_for_metrics(indices).tolist()
    return seen


def accelerator_of(batches):
    """Return an adopted accelerator."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=batches,
        mixed_precision="bf16" if MODE == "accumulate" else "no",
        log_with=Lines(),
        project_config=ProjectConfiguration(
            project_dir=str(FOLDER / "saved"), automatic_checkpoint_naming=True
        ),
    )
    return elastane.accelerate.adopt(accelerator)


class Training:
    """The loop of one worker, and what it says of itself."""

    def __init__(self):
        batches = 1 + (MODE in ("accumulate", "unsynchronised"))
        self.accelerator = accelerator = accelerator_of(batches)
        accelerator.init_trackers("joining", {"mode": MODE})
        model = made()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
        self.model, self.optimizer, self.scheduler, self.loader, self.evaluation = (
            accelerator.prepare(
                model,
                optimizer,
                scheduler,
                data(),
                DataLoader(Numbers(EVALUATED), batch_size=4),
            )
        )
        self.bare = accelerator.unwrap_model(self.model)
        self.second = (
            torch.optim.SGD(self.bare[0].parameters(), 1e-4) if MODE == "unnamed" else None
        )
        self.average = Average(self.bare)
        accelerator.register_for_checkpointing(self.average)
        accelerator.register_save_state_pre_hook(lambda *_: hold("save"))
        if MODE == "resume":
            newest = max((FOLDER / "saved" / "checkpoints").glob("checkpoint_*"), key=number_of)
            accelerator.load_state(str(newest))
            accelerator.project_configuration.iteration = number_of(newest) + 1
        accelerator.wait_for_everyone()
        (FOLDER / f"{os.getpid()}.ready").touch()
        self.file = (FOLDER / f"{os.getpid()}.jsonl").open("w")

    def run(self):
        """Train until it is enough."""
        accelerator = self.accelerator
        for epoch in self.loader.epochs(EPOCHS_MAX):
            self.train()
            before = accelerator.num_processes
            indices = evaluated(accelerator, self.model, self.evaluation)
            self.say({"epoch": epoch, "evaluated": indices, "before": before})
            accelerator.log({"samples": len(indices)}, step=epoch)
            accelerator.print(f"evaluated {epoch} by {accelerator.process_index}")
            if any_has(accelerator, "enough"):
                break
        accelerator.end_training()

    def train(self):
        """Make the steps that are left of an epoch."""
        loader, seen = self.loader, []
        for indices, inputs in loader:
            if loader.samples:
                seen += indices.tolist()
            if loader.is_last:
                number, world = self.average.steps + 1, self.accelerator.num_processes
                self.say({**self.where(), "dealt": seen, "optimizer_steps": number, "of": world})
                seen = []
            hold("train")
            if loader.step % STEPS == STEPS - 1:
                hold("last")
            time.sleep(0.01)
            if MODE == "unsynchronised":
                self.accelerator.backward(loss_of(self.model, inputs))
            else:
                self.compute(inputs)

    def compute(self, inputs):
        """Take a batch into the step; after its last batch, say what the step has made."""
        accelerator, model = self.accelerator, self.model
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, inputs))
            contributed = accelerator.num_processes
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            if self.second is not None:
                self.second.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        if accelerator.sync_gradients:
            self.average.add(self.bare)
            what = {
                "optimizer_steps": self.average.steps,
                "scheduled": self.scheduler.scheduler.last_epoch,
                "rate": self.scheduler.get_last_lr()[0],
                "digest": digest(self.bare, self.optimizer, self.average),
                "contributed": contributed,
            }
            self.say({**self.where(), **what})
            if self.average.steps % SAVE_EVERY == 0:
                accelerator.save_state()

    def where(self):
        """Return the place in the data."""
        return {"step": self.loader.step, "epoch": self.loader.epoch}

    def say(self, what):
        """Write a line."""
        seen = {"size": self.accelerator.num_processes, "index": self.accelerator.process_index}
        place = {"rank": torch.distributed.get_rank(), "world": torch.distributed.get_world_size()}
        self.file.write(json.dumps({**seen, **place, **what}) + "\n")
        self.file.flush()


def number_of(folder):
    """Return the number of a checkpoint."""
    return int(folder.name.rpartition("_")[2])


torch.set_num_threads(1)
hold_in_gathers()
torch.manual_seed(os.getpid())  # DDP gives the first ones the same parameters.
Training().run()
