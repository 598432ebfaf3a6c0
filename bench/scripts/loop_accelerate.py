"""A loop of the user's own with Accelerate: it logs, and saves each 50 steps.

loop_accelerate.py FOLDER plain|joining

`plain` resumes from its last checkpoint; `joining` has an adopted accelerator.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
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
from torch.utils.data import DataLoader

FOLDER, WAY = Path(sys.argv[1]), sys.argv[2]


def accelerator_and_loader() -> tuple[Accelerator, DataLoader]:
    # A save into a folder of its own each time, of which the two last are kept.
    saves = ProjectConfiguration(FOLDER, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=saves)
    if WAY == "plain":
        return accelerator, DataLoader(Texts(), PER_WORKER, shuffle=True)
    import elastane

    sampler = elastane.ElasticBatchSampler(len(Texts()), global_batch_size=BATCH)
    return elastane.accelerate.adopt(accelerator), DataLoader(Texts(), batch_sampler=sampler)


def resume(accelerator: Accelerator) -> None:
    saved = [*(FOLDER / "checkpoints").glob("checkpoint_*")]
    if saved and WAY == "plain":
        newest = max(saved, key=lambda path: int(path.name.rpartition("_")[2]))
        accelerator.load_state(str(newest))
        accelerator.project_configuration.iteration = int(newest.name.rpartition("_")[2]) + 1


def main() -> None:
    set_seed(0)
    accelerator, loader = accelerator_and_loader()
    model = tiny_bert()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    record_steps(FOLDER, optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    resume(accelerator)
    step = 0
    for _ in range(1000) if WAY == "plain" else loader.epochs(1000):
        for batch in loader:
            # A worker that joins has not counted the steps before.
            step = step + 1 if WAY == "plain" else loader.step + 1
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                accelerator.print(step, float(accelerator.reduce(loss.detach(), "mean")))
            if step % SAVE_EVERY == 0:
                accelerator.save_state()


main()
