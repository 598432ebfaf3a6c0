"""A toy training script for the bench: DDP over gloo, about 20 ms a step, a checkpoint of the step.

Every rank appends one line for each event to BENCH_DIR/steps.txt:

    <monotonic time> <node> <rank> <pid> <world size> <restart count> <what> <step>

where <what> is "start" (the first statement of this file ran) or "step" (the step is completed).
The monotonic clock is one for the whole machine, network namespaces included.

Modes: plain; sigterm (a handler sets a flag that all ranks agree on, rank 0 checkpoints, all exit);
should-checkpoint (the same through elastane.should_checkpoint()).
"""

from __future__ import annotations

import time

STARTED = time.monotonic()

import argparse  # noqa: E402 - the clock is read before the imports that are being measured
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def main() -> None:
    options = parse_options()
    note = line_writer(options.dir)
    note("start", 0, STARTED)
    asked_to_stop = ask_nobody
    if options.mode == "sigterm":
        asked_to_stop = listen_for_sigterm()
    if options.mode == "should-checkpoint":
        import elastane

        asked_to_stop = elastane.should_checkpoint
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = options.dir / "checkpoint.txt"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    data = torch.randn(8, 256)
    while step < options.steps:
        begun = time.monotonic()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note("step", step, time.monotonic())
        # `while` and not `if`: once asked, should_checkpoint() waits in the next call until this
        # worker is stopped, so every completed step is in the checkpoint.
        while agree(asked_to_stop(), options.mode):
            save(checkpoint, step)
            if options.mode == "sigterm":
                sys.exit(128 + signal.SIGTERM)
        if step % options.checkpoint_every == 0:
            save(checkpoint, step)
        time.sleep(max(0.0, options.step_s - (time.monotonic() - begun)))
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--mode", choices=("plain", "sigterm", "should-checkpoint"), required=True)
    return parser.parse_args()


def line_writer(folder: Path) -> Callable[[str, int, float], None]:
    """Return a function that appends one line in one write."""
    file = os.open(folder / "steps.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    env = os.environ
    who = (
        f"{env.get('BENCH_NODE', 'a')} {env['RANK']} {os.getpid()} "
        f"{env['WORLD_SIZE']} {env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    )

    def note(what: str, step: int, at: float) -> None:
        os.write(file, f"{at:.6f} {who} {what} {step}\n".encode())

    return note


def ask_nobody() -> bool:
    return False


def listen_for_sigterm() -> Callable[[], bool]:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    return lambda: bool(seen)


def agree(mine: bool, mode: str) -> bool:
    """Return whether any rank was asked to stop; elastane's own call is the same everywhere."""
    if mode != "sigterm":
        return mine
    flag = torch.tensor([float(mine)])
    dist.all_reduce(flag)
    return bool(flag.item() > 0)


def save(path: Path, step: int) -> None:
    if dist.get_rank() == 0:
        new = path.with_suffix(".tmp")
        new.write_text(str(step))
        new.replace(path)


if __name__ == "__main__":
    main()
