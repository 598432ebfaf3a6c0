"""A Lightning script with ElasticStrategy: workers are replaced and nodes join in place.

Usage: lightning_joining.py FOLDER [MODE]. Each process appends what it has after each step and each
validation to PID.jsonl. Training ends after the epoch in which a file "enough" is there. A file
"hold.PLACE" holds each process in that place until it is gone; one that is held makes
PID.held.PLACE. MODE:

- plain: nothing else
- accumulate: two batches to a step
- workers: two processes load the data
- manual: two optimizers, of which one steps on the gradients of two batches
- toggled: the same, with a backward pass of half of the parameters for each optimizer
- unreduced: manual optimization, with gradients that each worker keeps
- averages: a moving average of the weights, which validations and checkpoints have
- setup: an object is broadcast in setup()
- module: data and validation come from a LightningDataModule that prepares them
- interval: it validates and stops early within an epoch, and saves after each fifth step
- resume: it saves after each fifth step, and begins with the last checkpoint
"""

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from elastane.lightning import ElasticStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "shared"))
import small_regression as regression

FOLDER, MODE = Path(sys.argv[1]), "".join(sys.argv[2:]) or "plain"
VALIDATED, BY_HAND = 24, ("manual", "toggled", "unreduced")


def say(**what):
    """Write a line of this process."""
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({**what, "at": time.time()}) + "\n")


def hold(place):
    """Wait while the test holds this place."""
    held = FOLDER / f"{os.getpid()}.held.{place}"
    while (FOLDER / f"hold.{place}").exists():
        held.touch()
        time.sleep(0.01)


class Net(lightning.LightningModule):
    """The small regression."""

    def __init__(self):
        super().__init__()
        self.net = regression.made_model()
        self.error = torchmetrics.MeanSquaredError()
        self.validated = 0
        self.automatic_optimization = MODE not in BY_HAND

    def setup(self, stage):
        if MODE == "setup":
            self.trainer.strategy.broadcast("a name")

    def training_step(self, batch, index):
        hold("training")
        say(what="batch", step=steps_of(self.trainer), samples=batch[0].tolist())
        time.sleep(0.02)
        if not self.automatic_optimization:
            self.step_by_hand(batch[1], index, batch[0].tolist())
            return None
        loss = regression.loss_of(self.net, batch[1])
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def step_by_hand(self, inputs, index, indices):
        for optimizer, step in zip(self.optimizers(), regression.BY_HAND, strict=True):
            if MODE == "toggled":
                self.toggle_optimizer(optimizer)
            loss = regression.loss_of(self.net, inputs)
            if step == 2:
                hold("second")
                say(what="second", step=steps_of(self.trainer), samples=indices)
            with self.trainer.strategy.block_backward_sync() if MODE == "unreduced" else UNCHANGED:
                self.manual_backward(loss)
            if (index + 1) % step == 0:
                optimizer.step()
                optimizer.zero_grad()
            if MODE == "toggled":
                self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()

    def validation_step(self, batch, _index):
        hold("validation")
        self.validated += len(batch[0])
        self.error(self.net(batch[1]).squeeze(-1), batch[1].sum(1))
        self.log("val_error", self.error)
        self.log("val_loss", regression.loss_of(self.net, batch[1]), sync_dist=True)

    def on_train_epoch_end(self):
        self.trainer.should_stop = self.trainer.strategy.broadcast((FOLDER / "enough").exists())

    def on_validation_end(self):
        found = float(self.trainer.callback_metrics.get("val_error", -1))
        say(what="validation", step=self.global_step, error=found, samples=self.validated,
            world=self.trainer.world_size)  # fmt: skip
        self.validated = 0

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = self.global_step
        if threading.current_thread() is threading.main_thread():
            hold("saving")

    def on_load_checkpoint(self, checkpoint):
        say(what="loaded", mine=checkpoint["mine"], step=self.global_step)

    def configure_optimizers(self):
        if not self.automatic_optimization:
            optimizers, schedule = regression.made_optimizers(self.net)
            return optimizers, [schedule]
        optimizer, schedule = regression.made_optimizer(self)
        assert self.trainer.estimated_stepping_batches == 1000 * regression.STEPS
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


UNCHANGED = contextlib.nullcontext()


def steps_of(trainer):
    """Return the number of steps, which Lightning counts by optimizers if they step by hand."""
    processed = trainer.fit_loop.epoch_loop.batch_progress.total.processed
    return processed if MODE in BY_HAND else trainer.global_step


class Digests(Callback):
    """Writes the digest of all that is trained after each step, and counts them in its state."""

    def __init__(self):
        self.seen = 0

    def on_train_batch_end(self, trainer, module, *_args):
        if trainer.fit_loop._should_accumulate():
            return
        self.seen += 1
        tensors = [*module.state_dict().values()]
        for state in [s for each in trainer.optimizers for s in each.state.values()]:
            tensors += [each for each in state.values() if isinstance(each, torch.Tensor)]
        average = None
        for callback in trainer.callbacks:
            if isinstance(callback, EMAWeightAveraging):
                tensors += callback._average_model.state_dict().values()
                average = regression.sums_of(callback._average_model)
        digest = hashlib.sha1(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
        say(what="step", step=steps_of(trainer), digest=digest, world=trainer.world_size,
            rate=trainer.optimizers[0].param_groups[0]["lr"], seen=self.seen, average=average,
            weights=regression.sums_of(module))  # fmt: skip

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Data(lightning.LightningDataModule):
    """The data."""

    def prepare_data(self):
        (FOLDER / "prepared").touch()

    def train_dataloader(self):
        data, workers = regression.Numbers(), 2 * (MODE == "workers")
        return DataLoader(data, 8, shuffle=True, num_workers=workers)

    def val_dataloader(self):
        return DataLoader(regression.Numbers(VALIDATED), 8)


def main():
    """Train until it is enough."""
    torch.set_num_threads(1)
    lightning.seed_everything(1, verbose=False)
    keep = ModelCheckpoint(FOLDER / "ck", monitor="val_loss", save_last=True)
    callbacks = [keep, Digests()]
    options = {} if MODE in BY_HAND else {"gradient_clip_val": regression.CLIP}
    if MODE == "averages":
        callbacks.insert(0, EMAWeightAveraging(decay=regression.DECAY))
    if MODE in ("interval", "resume"):
        callbacks.append(ModelCheckpoint(FOLDER / "steps", every_n_train_steps=5, save_last=True))
    if MODE == "interval":
        callbacks.append(EarlyStopping("val_loss", patience=10_000))
        options["val_check_interval"] = 3
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1000, callbacks=callbacks,
        strategy=ElasticStrategy(
            global_batch_size=regression.BATCH, find_unused_parameters=MODE == "toggled"
        ), log_every_n_steps=4,
        logger=CSVLogger(FOLDER, "log"), enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=2 if MODE == "accumulate" else 1, num_sanity_val_steps=1, **options,
    )  # fmt: skip
    net, data = Net(), Data()
    if MODE == "module":
        trainer.fit(net, datamodule=data)
    else:
        last = FOLDER / "steps" / "last.ckpt"
        begin = last if MODE == "resume" and last.exists() else None
        loaders = data.train_dataloader(), data.val_dataloader()
        trainer.fit(net, *loaders, ckpt_path=begin, weights_only=False)
    say(what="end", step=trainer.global_step, best=keep.best_model_path)


main()
