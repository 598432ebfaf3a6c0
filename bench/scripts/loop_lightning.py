"""A Lightning script: it logs, and saves each 50 steps.

loop_lightning.py FOLDER plain|joining

`plain` has the strategy "ddp", and resumes from its last checkpoint; `joining` has ElasticStrategy.
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from loop_parts import (
    BATCH,
    LEARNING_RATE,
    LOG_EVERY,
    PER_WORKER,
    SAVE_EVERY,
    Classifier,
    Texts,
    record_steps,
)
from torch.utils.data import DataLoader

FOLDER, WAY = Path(sys.argv[1]), sys.argv[2]


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Classifier()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.net(**batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), LEARNING_RATE)
        record_steps(FOLDER, optimizer)
        return optimizer


def strategy() -> object:
    if WAY == "plain":
        return "ddp"
    from elastane.lightning import ElasticStrategy

    return ElasticStrategy(global_batch_size=BATCH)


def main() -> None:
    lightning.seed_everything(1, verbose=False)
    keep = ModelCheckpoint(FOLDER / "saved", every_n_train_steps=SAVE_EVERY, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy(),
        max_epochs=1000,
        callbacks=[keep],
        logger=CSVLogger(FOLDER, "log", version=0),
        log_every_n_steps=LOG_EVERY,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = FOLDER / "saved" / "last.ckpt"
    begin = str(last) if last.exists() else None
    loader = DataLoader(Texts(), PER_WORKER, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path=begin, weights_only=False)


main()
