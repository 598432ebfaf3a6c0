"""Train a small GPT on the source of Python's own standard library, with elastane's steps.

    elastane run --standalone --nproc-per-node 4 --min-workers 1 --max-restarts 9 gpt.py
    python gpt.py

It learns to predict the next byte. Nothing is downloaded and no checkpoint is loaded: the loss of a
worker costs the others the current step, and a joining worker receives its state from a survivor.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastane
from elastane.examples.progress import ProgressFiles

TEXT_BYTES, HELD_OUT_WINDOWS = 2_000_000, 256
BYTES, WINDOW, WIDTH, HEADS, LAYERS, DROPOUT = 256, 64, 128, 4, 2, 0.1
LEARNING_RATE, WARMUP_STEPS, CLIP_NORM = 3e-3, 30, 1.0


def main() -> None:
    """Train for `--steps` steps, then print the loss on held-out text."""
    options = parse_options()
    torch.manual_seed(options.seed)
    windows = standard_library()
    held_out, seen = windows[:HELD_OUT_WINDOWS], windows[HELD_OUT_WINDOWS:]
    batches = elastane.ElasticBatchSampler(len(seen), options.global_batch, seed=options.seed)
    loader = DataLoader(TensorDataset(seen), batch_sampler=batches)

    with elastane.init(deterministic=options.deterministic, seed=options.seed) as job:
        net = GPT().to(job.device)
        model = DistributedDataParallel(net, process_group=job.process_group)
        optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: rate(s, options.steps))
        job.track(net=net, optimizer=optimizer, schedule=schedule)
        progress = ProgressFiles(Path(options.dir) / "progress.jsonl", job, options.steps)

        for step, _ in job.steps(loader, until_step=options.steps):
            with step:
                seen = torch.zeros(2)  # the sum of the losses, and the number of windows
                for (batch,) in step.batches:
                    loss = model(batch.to(job.device))
                    step.backward(loss)
                    seen += torch.tensor([loss.item() * len(batch), len(batch)])
                nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                dist.all_reduce(seen, group=job.process_group)
            if step.committed:
                mean = float(seen[0] / seen[1])
                progress.report(step=step.number + 1, epoch=step.epoch, loss=mean)
            time.sleep(options.step_delay)

        weights = progress.end(net)
        if job.rank == 0:
            net.eval()
            with torch.no_grad():
                final = float(net(held_out.to(job.device)))
            progress.report(step=job.committed, epoch=0, final_loss=final)
            print(f"{final:.3f} nats a byte on held-out text; weights {weights}", flush=True)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's own source.")
    parser.add_argument("--dir", default="gpt", help="folder for the progress (%(default)s)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true", help="same bits in every world")
    return parser.parse_args()


def standard_library() -> Tensor:
    """Return the first bytes of the interpreter's own .py files, as windows (n, WINDOW)."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).view(-1, WINDOW).long()


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a warm-up, then half a cosine."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


class GPT(nn.Module):
    """A decoder over bytes; called with windows (n, WINDOW), it returns their mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, WIDTH)
        self.place = nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES))

    def forward(self, windows: Tensor) -> Tensor:
        """Predict each byte of a window from those before it."""
        given, wanted = windows[:, :-1], windows[:, 1:]
        places = torch.arange(given.shape[1], device=given.device)
        logits = self.head(self.blocks(self.token(given) + self.place(places)))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class Block(nn.Module):
    """Causal attention, then a perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before_mix, self.before_think = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, of the same shape as the input (n, length, WIDTH)."""
        heads = self.qkv(self.before_mix(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        thought: Tensor = self.think(self.before_think(x))
        return x + thought


if __name__ == "__main__":
    main()
