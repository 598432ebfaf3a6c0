"""An ordinary script with the Hugging Face Trainer, which knows no elastane.

Usage: trainer_in_place.py FOLDER. Each process writes to PID.jsonl, until a file "enough" is there.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from summed_numbers import Net, Numbers
from transformers import Trainer, TrainerCallback, TrainingArguments

FOLDER = Path(sys.argv[1])


class Ledger(TrainerCallback):
    """Writes what this process has after each step."""

    def __init__(self):
        self.file = (FOLDER / f"{os.getpid()}.jsonl").open("w")

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Write a line; wait a moment, so that the steps take some time."""
        weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        what = {"digest": hashlib.sha1(weights).hexdigest(), "step": state.global_step}
        what |= {"world": torch.distributed.get_world_size(), "size": args.world_size}
        what |= {"rank": args.process_index, "saves": args.should_save}
        self.file.write(json.dumps(what) + "\n")
        self.file.flush()
        time.sleep(0.01)
        enough = torch.tensor(int((FOLDER / "enough").exists()))
        torch.distributed.all_reduce(enough, op=torch.distributed.ReduceOp.MAX)
        control.should_training_stop = bool(enough)


torch.set_num_threads(1)
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(FOLDER / "checkpoints"), use_cpu=True, max_steps=10_000,
    per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=7, save_steps=10,
    save_total_limit=2, eval_strategy="steps", eval_steps=15, report_to=[], disable_tqdm=True,
    ddp_backend="gloo", dataloader_num_workers=0,
)  # fmt: skip
few = torch.utils.data.Subset(Numbers(), range(50))
trainer = Trainer(Net(), arguments, train_dataset=Numbers(), eval_dataset=few, callbacks=[Ledger()])
trainer.train()
