"""Ordinary scripts of a framework that log a loss every fifth of 60 steps, through elastane.

Usage: scalars_logged.py FOLDER trainer|lightning|accelerate
"""

import sys
import time
from pathlib import Path

import torch
from summed_numbers import Net, Numbers

import elastane

FOLDER, FRAMEWORK = Path(sys.argv[1]), sys.argv[2]
STEPS, EVERY = 60, 5


class SlowNet(Net):
    """A model whose steps take long enough for a kill among them."""

    def forward(self, x, labels):
        time.sleep(0.02)
        return super().forward(x, labels)


def with_trainer():
    """Train by the Hugging Face Trainer."""
    from transformers import Trainer, TrainingArguments

    from elastane.transformers import ScalarCallback

    arguments = TrainingArguments(
        output_dir=str(FOLDER / "saved"), use_cpu=True, max_steps=STEPS, logging_steps=EVERY,
        save_strategy="no", report_to=[], disable_tqdm=True, ddp_backend="gloo",
    )  # fmt: skip
    callback = ScalarCallback(FOLDER / "scalars.jsonl")
    Trainer(SlowNet(), arguments, train_dataset=Numbers(), callbacks=[callback]).train()


def with_lightning():
    """Train by Lightning."""
    import lightning

    from elastane.lightning import ScalarLogger

    class Module(lightning.LightningModule):
        """The model with its loss."""

        def __init__(self):
            super().__init__()
            self.net = SlowNet()

        def training_step(self, batch, _index):
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=3, strategy="ddp", max_steps=STEPS, log_every_n_steps=EVERY,
        logger=ScalarLogger(FOLDER / "scalars.jsonl"), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Numbers(), 8))


def with_accelerate():
    """Train by a loop with Accelerate."""
    from accelerate import Accelerator

    tracker = elastane.accelerate.scalar_tracker(FOLDER / "scalars.jsonl")
    accelerator = elastane.accelerate.adopt(Accelerator(cpu=True, log_with=tracker))
    accelerator.init_trackers("digits", {"lr": 1e-3})
    data, net = torch.utils.data.Subset(Numbers(), range(STEPS * 24)), SlowNet()
    batches = elastane.ElasticBatchSampler(len(data), 24)
    net, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), 1e-3),
        torch.utils.data.DataLoader(data, batch_sampler=batches),
    )
    for _ in loader.epochs(1):
        for batch in loader:
            with accelerator.accumulate(net):
                loss = net(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if (loader.step + 1) % EVERY == 0:
                accelerator.log({"loss": loss.item()}, step=loader.step + 1)
    accelerator.end_training()


torch.set_num_threads(1)
torch.manual_seed(0)
{"trainer": with_trainer, "lightning": with_lightning, "accelerate": with_accelerate}[FRAMEWORK]()
