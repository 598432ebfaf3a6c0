"""An ElasticTrainer, so that workers join the Hugging Face Trainer in place.

Usage: joining_trainer.py FOLDER [MODE]. It ends at the end of an epoch after a file "enough" is
there. It writes what it has after each update. The process of a file PID.hold-X makes PID.held-X
when it comes to X, and waits to be killed: X is train, last (the last update of an epoch),
evaluate, save or log. MODE:

- plain: nothing else
- tokens: two batches to an update, and a loss that is a sum over the number of all labels
- stream: the samples are those of shards whose lengths are not known
- short: it ends by itself, after EPOCHS epochs
- resume: as short, from the newest checkpoint
- grouped: a sampling strategy that is refused
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, Subset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from elastane.data import sources
from elastane.transformers import ElasticTrainerMixin

FOLDER, MODE = Path(sys.argv[1]), "".join(sys.argv[2:]) or "plain"
SAMPLES, BATCH = 240, 24
STEPS = SAMPLES // BATCH
EPOCHS = 8 if MODE in ("short", "resume") else 1000
# Of the shards of the stream.
FIRSTS = [0, 50, 50, 51, 141, 178, 202, SAMPLES]


class Numbers(Dataset):
    """Samples that are functions of their index; one of three labels is not counted."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        labels = values[:3].gt(0).long()
        labels[index % 3] = -100
        return {"x": values, "labels": labels, "index": index}


class Net(torch.nn.Module):
    """A model as the Trainer wants it: it returns the mean of its loss."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 6)
        )

    def forward(self, x, labels, index=None):
        """Return loss and predictions."""
        return self.computed(x, labels, labels.ne(-100).sum())

    def computed(self, x, labels, count):
        """Return the sum of the losses, divided by `count`, and predictions."""
        predicted = self.layers(x).reshape(-1, 2)
        loss = torch.nn.functional.cross_entropy(predicted, labels.reshape(-1), reduction="sum")
        return {"loss": loss / count, "logits": predicted.reshape(len(x), 3, 2)}


class CountingNet(Net):
    """A model that divides by the number of labels of all workers."""

    def forward(self, x, labels, index=None, num_items_in_batch=None, **kwargs):
        """Return loss and predictions."""
        count = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        return self.computed(x, labels, count)


def opened(shard, start, _epoch):
    """Yield the samples of a shard."""
    return (Numbers()[index] for index in range(FIRSTS[shard] + start, FIRSTS[shard + 1]))


def hold(where):
    """Wait to be killed, if the test asks for it."""
    if (FOLDER / f"{os.getpid()}.hold-{where}").exists():
        (FOLDER / f"{os.getpid()}.held-{where}").touch()
        signal.pause()


class Recorded(Trainer):
    """A Trainer of the user's own, which says what it does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen, self.batches, self.file = [], 0, None

    def say(self, what):
        """Write a line."""
        place = {"rank": torch.distributed.get_rank(), "world": torch.distributed.get_world_size()}
        shown = {"size": self.args.world_size, "index": self.args.process_index}
        self.file.write(json.dumps({**place, **shown, **what}) + "\n")
        self.file.flush()

    def where(self):
        """Return the place in the data."""
        return {"step": self._elastic.step, "epoch": self._elastic.epoch}

    def updates(self):
        """Return how many updates the optimizer has made."""
        inner = self.optimizer.optimizer
        states = [*inner.state.values()]
        return int(states[0]["step"]) if states else 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.batches += 1
        if self.current_samples:
            self.seen += inputs.pop("index").tolist()
        else:
            inputs.pop("index")
        if self.batches % self.args.gradient_accumulation_steps == 0:
            world = torch.distributed.get_world_size()
            number = self.updates() + 1
            self.say({**self.where(), "dealt": self.seen, "optimizer_steps": number, "of": world})
            self.seen = []
        hold("train")
        if self._elastic.step % STEPS == STEPS - 1:
            hold("last")
        time.sleep(0.01)
        return super().training_step(model, inputs, num_items_in_batch)

    def has_updated(self, optimizer, *_):
        """Say what the optimizer has made."""
        if optimizer is not self.optimizer.optimizer:
            return  # A worker that joins warms torch up by another one.
        tensors = [*self.model.state_dict().values()]
        for state in optimizer.state_dict()["state"].values():
            tensors += [each for each in state.values() if isinstance(each, torch.Tensor)]
        digest = hashlib.sha1(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
        contributed = torch.distributed.get_world_size()
        what = {"optimizer_steps": self.updates(), "digest": digest, "contributed": contributed}
        self.say({**self.where(), **what, "global_step": self.state.global_step})

    def prediction_step(self, *args, **kwargs):
        hold("evaluate")
        return super().prediction_step(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        hold("save")
        super()._save_optimizer_and_scheduler(output_dir)


class Reports(TrainerCallback):
    """Writes what the Trainer says of its progress, and ends the job."""

    def __init__(self):
        self.trainer = None

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        rate = lr_scheduler.get_last_lr()[0]
        self.trainer.say({"made": state.global_step, "rate": rate, "max_steps": state.max_steps})

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            hold("log")
            with (FOLDER / "logged.txt").open("a") as file:
                file.write(json.dumps({"by": os.getpid(), "at": state.global_step, **logs}) + "\n")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.trainer.say({"evaluated": metrics["eval_samples"]})

    def on_epoch_end(self, args, state, control, **kwargs):
        enough = torch.tensor(int((FOLDER / "enough").exists()))
        torch.distributed.all_reduce(enough, op=torch.distributed.ReduceOp.MAX)
        control.should_training_stop |= bool(enough) and EPOCHS == 1000


def metrics_of(predicted):
    """Return how many samples were evaluated."""
    return {"samples": len(predicted.label_ids), "quality": 1.0}


class ElasticRecorded(ElasticTrainerMixin, Recorded):
    """The user's Trainer, whose workers join in place."""


def main():
    """Train until it is enough."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # DDP gives the first ones the same parameters.
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "checkpoints"), use_cpu=True, num_train_epochs=EPOCHS,
        learning_rate=1e-3, logging_steps=4, save_steps=25, eval_strategy="steps", eval_steps=10,
        gradient_accumulation_steps=1 + (MODE == "tokens"), report_to=[], disable_tqdm=True,
        ddp_backend="gloo", save_total_limit=3, metric_for_best_model="eval_quality",
        train_sampling_strategy="group_by_length" if MODE == "grouped" else "random",
        max_steps=EPOCHS * STEPS if MODE == "stream" else -1,
    )  # fmt: skip
    reports, stopping = Reports(), EarlyStoppingCallback(10_000)
    data = sources.ShardSource(range(len(FIRSTS) - 1), opened) if MODE == "stream" else Numbers()
    trainer = ElasticRecorded(
        CountingNet() if MODE == "tokens" else Net(), arguments, train_dataset=data,
        eval_dataset=Subset(Numbers(), range(50)), callbacks=[reports, stopping],
        compute_metrics=metrics_of, global_batch_size=BATCH,
    )  # fmt: skip
    reports.trainer = trainer
    (FOLDER / f"{os.getpid()}.ready").touch()
    trainer.file = (FOLDER / f"{os.getpid()}.jsonl").open("w")
    register_optimizer_step_post_hook(trainer.has_updated)
    trainer.train(resume_from_checkpoint=MODE == "resume" or None)
    trainer.say(
        {
            "ended": trainer.state.global_step,
            "patience": stopping.early_stopping_patience_counter,
            "rate": trainer.lr_scheduler.get_last_lr()[0],
        }
    )


main()
