"""A Hydra application around Lightning, configured by overrides on the command line."""

import json
import os
import signal
import sys
from pathlib import Path

import hydra
import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from omegaconf import DictConfig
from torch.utils.data import DataLoader, TensorDataset


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
    def __init__(self, folder, run):
        self.folder, self.run = folder, run

    def on_train_epoch_end(self, trainer, module):
        if trainer.is_global_zero:
            with (self.folder / "story").open("a") as file:
                line = {
                    "what": "epoch",
                    "epoch": trainer.current_epoch,
                    "loss": float(trainer.callback_metrics["loss"]),
                    "world": trainer.world_size,
                    "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
                    "run": self.run,
                }
                file.write(json.dumps(line) + "\n")

    def on_train_batch_start(self, trainer, module, batch, index):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and trainer.current_epoch == 2 and index == 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig):
    folder = Path(config.folder)
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x @ torch.tensor([[1.0], [2.0], [3.0]]))
    trainer = lightning.Trainer(
        **config.trainer,
        callbacks=[
            Story(folder, HydraConfig.get().runtime.output_dir),
            ModelCheckpoint(folder / "checkpoints", save_last=True),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "checkpoints" / "last.ckpt"
    trainer.fit(Line(), DataLoader(data, batch_size=8), ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        with (folder / "story").open("a") as file:
            file.write(json.dumps({"what": "done", "restarts": restarts}) + "\n")


if __name__ == "__main__":
    assert "RANK" in os.environ, sys.argv
    main()
