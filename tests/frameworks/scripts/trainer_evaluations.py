"""An ordinary script with the Hugging Face Trainer that loses workers in its evaluations.

Usage: trainer_evaluations.py FOLDER, with three workers. Worker 1 dies in the first evaluation and
worker 0 in the second; worker 2 writes the samples of each evaluation to said.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from summed_numbers import Net, Numbers
from transformers import Trainer, TrainingArguments

FOLDER = Path(sys.argv[1])
FIRST_RANK = int(os.environ["RANK"])
# In batches of 4 for three workers: five rounds, the last of which has two samples.
SAMPLES = 50
# In predictions of one worker: the first evaluation has five, and is then made by two workers.
DIES_AT = {1: 2, 0: 5 + 7 + 2}


class DyingTrainer(Trainer):
    """A Trainer whose workers kill themselves in a prediction."""

    predictions = 0

    def prediction_step(self, *args, **kwargs):
        """Predict, unless this worker dies."""
        self.predictions += 1
        if self.predictions == DIES_AT.get(FIRST_RANK):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prediction_step(*args, **kwargs)


def main():
    """Train six steps, with an evaluation after each second one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    few = torch.utils.data.Subset(Numbers(), range(SAMPLES))
    numbers = {few[n]["labels"].item(): n for n in range(SAMPLES)}
    evaluated = []

    def compute_metrics(found):
        evaluated.append([numbers[each] for each in found.label_ids.reshape(-1).tolist()])
        return {}

    arguments = TrainingArguments(
        output_dir=str(FOLDER / "checkpoints"), use_cpu=True, max_steps=6, eval_strategy="steps",
        eval_steps=2, per_device_train_batch_size=4, per_device_eval_batch_size=4, report_to=[],
        disable_tqdm=True, ddp_backend="gloo", save_strategy="no", label_names=["labels"],
    )  # fmt: skip
    trainer = DyingTrainer(
        Net(), arguments, train_dataset=Numbers(), eval_dataset=few, compute_metrics=compute_metrics
    )
    trainer.train()
    if FIRST_RANK == 2:
        said = {"evaluated": evaluated, "steps": trainer.state.global_step}
        (FOLDER / "said.json").write_text(json.dumps(said))


main()
