"""Records what a training script of the documents does, and ends its workers at chosen places.

The script imports it first. It trains a torch.nn.Sequential by one optimizer. Each worker writes to
PID.jsonl in $RECORD: the weights before its first step, the inputs of each forward pass, and after
each step its number, the weights, learning rate and world size.

$LOSSES has words STEP:PLACE:RANK. The worker of this rank ends in the first such step from STEP on
in a world of two, one loss after the other. PLACE is "forward", "update" (after the optimizer's),
or "last", the forward pass of an epoch's last step.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

# As the pages have them: 4,096 samples in batches of 64.
STEPS_OF_EPOCH = 64
# A worker that is alone takes longer for its passes, so that another joins before the last step.
ALONE_S = 0.1
FOLDER = Path(os.environ["RECORD"])
LOSSES = [word.split(":") for word in os.environ["LOSSES"].split()]


class Recorder:
    """What one worker has done."""

    def __init__(self):
        self.net = None
        self.made = 0
        register_module_forward_pre_hook(self.on_forward)
        register_optimizer_step_post_hook(self.on_step)

    def on_forward(self, module, inputs):
        """Before a forward pass of any module."""
        if not isinstance(module, torch.nn.Sequential) or not torch.is_grad_enabled():
            return
        if self.net is None:
            self.net = module
            self.write(begun=self.weights())
        self.write(inputs=inputs[0].flatten().tolist())
        is_last = self.made % STEPS_OF_EPOCH == STEPS_OF_EPOCH - 1
        self.end_at("forward", *(["last"] if is_last else []))

    def on_step(self, optimizer, args, kwargs):
        """After a step of an optimizer."""
        self.made = int(next(iter(optimizer.state.values()))["step"])
        rate = optimizer.param_groups[0]["lr"]
        self.write(made=self.made, weights=self.weights(), rate=rate, world=dist.get_world_size())
        self.end_at("update")

    def end_at(self, *places):
        """End this worker if the next loss is here."""
        number = len([*FOLDER.glob("lost-*")])
        if number == len(LOSSES):
            return
        if dist.get_world_size() == 1:
            time.sleep(ALONE_S)
        else:
            step, place, rank = LOSSES[number]
            if place in places and self.made >= int(step) and dist.get_rank() == int(rank):
                (FOLDER / f"lost-{number}").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def weights(self):
        """All weights, one after another."""
        return [float(each) for part in self.net.parameters() for each in part.detach().flatten()]

    def write(self, **line):
        """Write a line."""
        with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


Recorder()
