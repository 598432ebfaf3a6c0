"""A LightningModule under DDP: resumes from its checkpoint, and dies once where it is told to."""

import json
import os
import signal
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset

folder = Path(sys.argv[1])
epochs, nodes, devices = map(int, sys.argv[2:5])


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Story(Callback):
    @rank_zero_only
    def note(self, trainer, what):
        with (folder / "story").open("a") as file:
            loss = trainer.callback_metrics.get("loss")
            line = {
                "what": what,
                "epoch": trainer.current_epoch,
                "step": trainer.global_step,
                "loss": float(loss) if loss is not None else None,
                "world": trainer.world_size,
                "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            }
            file.write(json.dumps(line) + "\n")

    def on_train_epoch_end(self, trainer, module):
        self.note(trainer, "epoch")

    def on_train_batch_start(self, trainer, module, batch, index):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and trainer.current_epoch == 2 and index == 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    assert TorchElasticEnvironment.detect(), "Lightning does not see its launcher"
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 3, generator=generator)
    data = TensorDataset(x, x @ torch.tensor([[1.0], [2.0], [3.0]]))
    story = Story()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=devices,
        num_nodes=nodes,
        max_epochs=epochs,
        callbacks=[story, ModelCheckpoint(folder / "checkpoints", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert isinstance(trainer.strategy.cluster_environment, TorchElasticEnvironment)
    last = folder / "checkpoints" / "last.ckpt"
    trainer.fit(Line(), DataLoader(data, batch_size=8), ckpt_path=last if last.exists() else None)
    story.note(trainer, "done")


main()
