"""A Trainer of Lightning that loses worker 1 of three in its second step.

Usage: trainer_follows.py FOLDER own|trainers. The process group is made by the script or by the
Trainer. The worker of rank 0 writes to said.json what it has at the end.
"""

import json
import os
import signal
import sys
from pathlib import Path

import lightning
import torch

FOLDER = Path(sys.argv[1])
FIRST_RANK = int(os.environ["RANK"])


class Net(lightning.LightningModule):
    """A model whose loss is the rank."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        """Log a mean over the workers."""
        if index == 1 and FIRST_RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("rank", float(FIRST_RANK + 1), sync_dist=True)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 1e-3)


torch.set_num_threads(1)
if sys.argv[2] == "own":
    torch.distributed.init_process_group("gloo")
trainer = lightning.Trainer(
    accelerator="cpu", devices=3, strategy="ddp", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
data = torch.utils.data.TensorDataset(torch.ones(12, 1))
trainer.fit(Net(), torch.utils.data.DataLoader(data, 1))
if trainer.is_global_zero:
    said = {"world": trainer.world_size, "rank": trainer.callback_metrics["rank"].item()}
    (FOLDER / "said.json").write_text(json.dumps(said))
