"""An ordinary Accelerate script, which knows no elastane; it writes what it has after each step.

Usage: accelerate_in_place.py FOLDER. Each process writes to PID.jsonl, until a file "enough" is
there. The process of a file PID.hold makes PID.held after its next step, and waits to be killed.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

FOLDER = Path(sys.argv[1])


def main():
    """Train until it is enough."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    data = torch.Generator().manual_seed(accelerator.process_index)
    is_enough = False
    with (FOLDER / f"{os.getpid()}.jsonl").open("w") as file:
        while not is_enough:
            time.sleep(0.01)
            inputs = torch.randn(8, 16, generator=data)
            # As the Hugging Face Trainer does: DDP divides the sum of the workers by their number.
            loss = (net(inputs) - 1).square().mean() * accelerator.num_processes
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            digest = hashlib.sha1(net.module.weight.detach().numpy().tobytes()).hexdigest()
            what = {"digest": digest, "world": torch.distributed.get_world_size()}
            what |= {"size": accelerator.num_processes, "rank": accelerator.process_index}
            what["scheduled"] = scheduler.scheduler.last_epoch
            file.write(json.dumps(what) + "\n")
            file.flush()
            # The others wait in the gather's barrier then: a loss in the gather itself, which is
            # for workers of that number, would restart them all.
            if (FOLDER / f"{os.getpid()}.hold").exists():
                (FOLDER / f"{os.getpid()}.held").touch()
                signal.pause()
            enough = torch.tensor([int((FOLDER / "enough").exists())])
            is_enough = bool(accelerator.gather(enough).max())
    accelerator.end_training()


main()
