"""Train the classifier of digits.py with elastane's steps: survivors keep their processes.

    elastane run --standalone --nproc-per-node 4 --min-workers 1 --max-restarts 9 \\
        digits_in_place.py --dir /tmp/digits
    python digits_in_place.py --dir /tmp/digits

It loads no checkpoint and handles no signal: a joining worker receives its state from a survivor,
and the loss of a worker costs the others the current step.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastane
from elastane.examples.digits import (
    LEARNING_RATE,
    TRAIN_IMAGES,
    WARMUP_STEPS,
    build_model,
    load_digits,
    options_parser,
)
from elastane.examples.progress import ProgressFiles


def main() -> None:
    """Train to the last epoch, then test on the held-out digits."""
    parser = options_parser()
    parser.add_argument("--deterministic", action="store_true", help="same bits in every world")
    options = parser.parse_args()
    folder = Path(options.dir)
    torch.manual_seed(options.seed)
    images, labels = load_digits(folder / "digits.npz")
    held_out = images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:]
    data = TensorDataset(images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES])
    batches = elastane.ElasticBatchSampler(len(data), options.global_batch, seed=options.seed)
    total_steps = options.epochs * batches.ledger.steps_per_epoch

    with elastane.init(deterministic=options.deterministic, seed=options.seed) as job:
        net = build_model()
        model = DistributedDataParallel(net, process_group=job.process_group)
        optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
        one_cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LEARNING_RATE, total_steps + 1, pct_start=WARMUP_STEPS / total_steps
        )
        job.track(net=net, optimizer=optimizer, schedule=one_cycle)
        progress = ProgressFiles(
            Path(options.progress or folder / "progress.jsonl"), job, total_steps
        )

        loader = DataLoader(data, batch_sampler=batches)
        for step, _ in job.steps(loader, until_epoch=options.epochs):
            with step:
                seen = torch.zeros(2)  # the sum of the losses, and the number of samples
                for inputs, wanted in step.batches:
                    loss = nn.functional.cross_entropy(model(inputs), wanted)
                    step.backward(loss)
                    seen += torch.tensor([loss.item() * len(inputs), len(inputs)])
                optimizer.step()
                optimizer.zero_grad()
                one_cycle.step()
                dist.all_reduce(seen, group=job.process_group)
            if step.committed:
                mean = float(seen[0] / seen[1])
                progress.report(step=step.number + 1, epoch=step.epoch, loss=mean)
            time.sleep(options.step_delay)

        weights = progress.end(net)
        if job.rank == 0:
            final = accuracy(net, *held_out)
            progress.report(step=job.committed, epoch=options.epochs, final_accuracy=final)
            print(f"accuracy on {len(held_out[1])} held-out digits: {final:.2%}; weights {weights}")


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of `images` that is classified as `labels` says."""
    net.eval()
    return float((net(images).argmax(dim=1) == labels).float().mean())


if __name__ == "__main__":
    main()
