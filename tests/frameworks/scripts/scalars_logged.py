"""Ordinary scripts of a framework that log a loss every fifth of 60 steps, through elastane.

Usage: scalars_logged.py FOLDER trainer|lightning|accelerate
"""

import sys
import time
from pathlib import Path

import torch

import elastane

FOLDER, FRAMEWORK = Path(sys.argv[1]), sys.argv[2]
STEPS, EVERY = 60, 5


class Numbers(torch.utils.data.Dataset):
    """Samples that are functions of their index."""

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": values, "labels": values.sum().reshape(1)}


class Net(torch.nn.Module):
    """A model as the Trainer wants it: it returns its loss."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, x, labels):
        time.sleep(0.02)
        predicted = self.linear(x)
        return {"loss": (predicted - labels).square().mean(), "logits": predicted}


def with_trainer():
    """Train by the Hugging Face Trainer."""
    from transformers import Trainer, TrainingArguments

    from elastane.transformers import ScalarCallback

    arguments = TrainingArguments(
        output_dir=str(FOLDER / "saved"), use_cpu=True, max_steps=STEPS, logging_steps=EVERY,
        save_strategy="no", report_to=[], disable_tqdm=True, ddp_backend="gloo",
    )  # fmt: skip
    callback = ScalarCallback(FOLDER / "scalars.jsonl")
    Trainer(Net(), arguments, train_dataset=Numbers(), callbacks=[callback]).train()


def with_lightning():
    """Train by Lightning."""
    import lightning

    from elastane.lightning import ScalarLogger

    class Module(lightning.LightningModule):
        """The model with its loss."""

        def __init__(self):
            super().__init__()
            self.net = Net()

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
    data, net = torch.utils.data.Subset(Numbers(), range(STEPS * 24)), Net()
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
