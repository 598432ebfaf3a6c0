"""An ordinary Lightning script: validation, metrics, checkpoints, CSV log; it knows no elastane.

Usage: lightning_in_place.py FOLDER. Each process writes what it has after each batch, and after
each validation, to PID.jsonl. Training ends after the epoch in which a file "enough" is there.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(sys.argv[1])
SAMPLES, CLASSES = 768, 4  # without rest in worlds of 1, 2 and 3


class Net(lightning.LightningModule):
    """A small classifier with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(),
            torch.nn.Linear(32, CLASSES),
        )  # fmt: skip
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
        self.seen = 0

    def training_step(self, batch, index):
        inputs, labels = batch
        # In the middle of an epoch all others are at this step, too, and in no broadcast.
        while index > 0 and (FOLDER / "hold").exists():
            (FOLDER / "held").touch()
            time.sleep(0.01)
        time.sleep(0.01)
        loss = torch.nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, _index):
        inputs, labels = batch
        time.sleep(0.01)
        found = self.net(inputs)
        self.accuracy(found, labels)
        self.seen += len(labels)
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", torch.nn.functional.cross_entropy(found, labels), sync_dist=True)

    def on_train_batch_end(self, *_args):
        state = [each.detach().numpy().tobytes() for each in self.parameters()]
        digest = hashlib.sha1(b"".join(state)).hexdigest()
        self.write(what="step", number=self.trainer.fit_loop.epoch_loop.total_batch_idx,
                   digest=digest, world=self.trainer.world_size)  # fmt: skip

    def on_train_epoch_end(self):
        self.trainer.should_stop = self.trainer.strategy.broadcast((FOLDER / "enough").exists())

    def on_validation_end(self):
        found = float(self.trainer.callback_metrics.get("val_accuracy", -1))
        self.write(what="validation", step=self.global_step, accuracy=found, seen=self.seen)
        self.seen = 0

    def write(self, **what):
        with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main():
    """Train until it is enough."""
    torch.set_num_threads(1)
    lightning.seed_everything(1)
    inputs = torch.randn(SAMPLES, 16)
    data = TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))
    keep = ModelCheckpoint(FOLDER / "ck", monitor="val_loss", save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=3, strategy="ddp", max_epochs=1000, callbacks=[keep],
        logger=CSVLogger(FOLDER, "log", version=0), log_every_n_steps=4,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(data, 32, shuffle=True), DataLoader(data, 32))
    saved = torch.load(FOLDER / "ck" / "last.ckpt", weights_only=False)
    net = Net()
    net.load_state_dict(saved["state_dict"])
    net.eval()
    right = (net.net(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        what = {"what": "end", "step": saved["global_step"], "accuracy": float(right)}
        file.write(json.dumps(what) + "\n")


main()
