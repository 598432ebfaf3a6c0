"""An ordinary DDP script without elastane, which notes each step before it is made and after it.

It saves every few steps by rank 0, in a file that names the step, and starts at the newest file.
The samples of a step depend on its number alone, and are dealt to the ranks of the world in which
the script started. Each process appends to a file of its own in FOLDER/notes. All stop after the
step in which a rank finds FOLDER/enough.

    script_steps.py FOLDER STEP_S
"""

import hashlib
import itertools
import json
import os
import struct
import sys
import time
from pathlib import Path

SAMPLES, SIZE = 12, 8
SAVE_EVERY = 10
LEARNING_RATE, MOMENTUM = 1e-3, 0.5


def gradient(step, sample):
    """Return what one sample adds at a step, and nothing else would."""
    return [(step * 7919 + sample * 104729 + place * 1299709) % 65537 for place in range(SIZE)]


def samples_of(rank, size):
    """Return the samples of a rank, in each step."""
    return list(range(SAMPLES)[rank::size])


def digest(weights, momentum):
    """Return a digest of all bits of a state."""
    packed = struct.pack(f"<{2 * SIZE}d", *weights, *momentum)
    return hashlib.sha256(packed).hexdigest()[:16]


def replayed(state, step, ranks, size):
    """Return the weights and momentum after a step to which these ranks contribute."""
    rows = [gradient(step, sample) for rank in ranks for sample in samples_of(rank, size)]
    sums = [sum(column) * size / len(ranks) for column in zip(*rows, strict=True)]
    momentum = [MOMENTUM * m + g for m, g in zip(state[1], sums, strict=True)]
    weights = [w - LEARNING_RATE * m for w, m in zip(state[0], momentum, strict=True)]
    return tuple(weights), tuple(momentum)


def newest(folder):
    """Return the steps of the newest checkpoint in a folder; 0 if it has none."""
    return max((int(path.stem) for path in folder.glob("*.pt")), default=0)


class Training:
    """The state of a worker, and its file of notes."""

    def __init__(self, folder, step_s):
        import torch
        import torch.distributed as dist
        import uncompiled  # noqa: F401 - before the optimizer is made
        from torch.nn.parallel import DistributedDataParallel

        self.folder, self.step_s = folder, step_s
        self.saves = folder / "saves"
        self.saves.mkdir(exist_ok=True)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.net = torch.nn.Linear(SIZE, 1, bias=False).to(torch.float64)
        torch.nn.init.zeros_(self.net.weight)
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        # A host that lost its power has the same process numbers again.
        name = f"{os.environ['ELASTANE_NODE']}.{os.getpid()}.{time.monotonic_ns()}.jsonl"
        self.log = (folder / "notes" / name).open("x", buffering=1)

    def state(self):
        """Return weights and momentum as numbers."""
        weights = self.net.weight.flatten().tolist()
        momentum = self.optimizer.state[self.net.weight].get("momentum_buffer")
        return weights, [0.0] * SIZE if momentum is None else momentum.flatten().tolist()

    def note(self, what, step, **more):
        """Append a note, with the fence in which this process started."""
        weights, momentum = self.state()
        more |= {"fence": [int(os.environ[f"ELASTANE_{n}"]) for n in ("ROUND", "ATTEMPT")]}
        more |= {"rank": self.rank, "size": self.size, "weights": weights}
        more |= {"digest": digest(weights, momentum), "at_s": time.monotonic()}
        self.log.write(json.dumps({"what": what, "step": step, **more}) + "\n")

    def resume(self):
        """Load the newest checkpoint that rank 0 sees; return its number of steps."""
        import torch
        import torch.distributed as dist

        first = torch.tensor([newest(self.saves)])
        dist.broadcast(first, 0)
        if first.item():
            saved = torch.load(self.saves / f"{first.item()}.pt")
            self.net.load_state_dict(saved["net"])
            self.optimizer.load_state_dict(saved["optimizer"])
        return first.item()

    def make(self, step):
        """Make a step; return whether a rank has found FOLDER/enough."""
        import torch
        import torch.distributed as dist

        self.note("body", step)
        rows = [gradient(step, sample) for sample in samples_of(self.rank, self.size)]
        self.optimizer.zero_grad()
        time.sleep(self.step_s / 2)
        # DistributedDataParallel takes the mean over the workers, so this is a sum over samples.
        (self.model(torch.tensor(rows, dtype=torch.float64)).sum() * self.size).backward()
        self.optimizer.step()
        self.note("committed", step)
        time.sleep(self.step_s / 2)
        enough = torch.tensor([int((self.folder / "enough").exists())])
        dist.all_reduce(enough, op=dist.ReduceOp.MAX)
        return bool(enough.item())

    def save(self, steps):
        """Save on rank 0, by a file that is whole as soon as it has its name."""
        import torch

        if self.rank:
            return
        began_s = time.monotonic()
        part = self.saves / f"{steps}.{os.getpid()}.part"
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, part)
        part.replace(self.saves / f"{steps}.pt")
        self.note("saved", steps, began_s=began_s)


def main():
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(Path(sys.argv[1]), float(sys.argv[2]))
    for step in itertools.count(training.resume()):
        enough = training.make(step)
        if enough or (step + 1) % SAVE_EVERY == 0:
            training.save(step + 1)
        if enough:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
