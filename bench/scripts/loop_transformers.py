"""A script with the Trainer of Transformers: it logs, and saves each 50 steps.

loop_transformers.py FOLDER plain|joining

`plain` resumes from its last checkpoint; `joining` has an ElasticTrainer.
"""

import sys
from pathlib import Path

from loop_parts import (
    BATCH,
    LEARNING_RATE,
    LOG_EVERY,
    PER_WORKER,
    SAVE_EVERY,
    Texts,
    record_steps,
    tiny_bert,
)
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

FOLDER, WAY = Path(sys.argv[1]), sys.argv[2]


class Recorded(TrainerCallback):
    """Records the steps of the optimizer that the Trainer has made."""

    def on_train_begin(self, *_: object, **kept: object) -> None:
        record_steps(FOLDER, kept["optimizer"].optimizer)


def trainer_of(arguments: TrainingArguments) -> Trainer:
    parts = {"train_dataset": Texts(), "callbacks": [Recorded()]}
    if WAY == "plain":
        return Trainer(tiny_bert(), arguments, **parts)
    from elastane.transformers import ElasticTrainer

    return ElasticTrainer(tiny_bert(), arguments, global_batch_size=BATCH, **parts)


def main() -> None:
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "saved"),
        use_cpu=True,
        ddp_backend="gloo",
        num_train_epochs=1000,
        per_device_train_batch_size=PER_WORKER,
        learning_rate=LEARNING_RATE,
        logging_steps=LOG_EVERY,
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
    )
    saved = FOLDER / "saved"
    begin = get_last_checkpoint(str(saved)) if saved.exists() and WAY == "plain" else None
    trainer_of(arguments).train(resume_from_checkpoint=begin)


main()
