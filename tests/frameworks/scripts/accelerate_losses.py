"""An ordinary Accelerate script in which workers kill themselves at places that are named here.

Usage: accelerate_losses.py FOLDER, with four workers, of which the one that begins with rank 3
is left. It writes what it has to said.json: the samples that it has evaluated, and numbers.
"""

import functools
import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration

FOLDER = Path(sys.argv[1])
FIRST_RANK = int(os.environ["RANK"])
# In batches of 2 for four workers: the last round has four samples, and four that are repeated.
SAMPLES = 20


def die(rank):
    """End the worker that has begun with this rank."""
    if rank == FIRST_RANK:
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_sum(rank):
    """End the worker that has begun with this rank in its next sum, which the others begin."""
    if rank == FIRST_RANK:
        torch.distributed.all_reduce = lambda *_args, **_kwargs: die(rank)


class FileTracker(GeneralTracker):
    """Appends what is logged to one file."""

    name = "file"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.file = None

    @property
    def tracker(self):
        """What logs."""
        return self.file

    @on_main_process
    def start(self):
        """Open the file."""
        self.file = (FOLDER / "tracked").open("a")

    @on_main_process
    def store_init_configuration(self, values):
        """Leave out the configuration."""

    @on_main_process
    def log(self, values, step=None, **_):
        """Append a step."""
        self.file.write(f"{step}:{values['loss']}\n")
        self.file.flush()


def save_alone(accelerator):
    """Save on the main process only, as the scripts of diffusers do."""
    project = accelerator.project_configuration
    number, project.automatic_checkpoint_naming = project.iteration, False
    if accelerator.is_main_process:
        accelerator.save_state(str(FOLDER / "alone"))
    project.iteration, project.automatic_checkpoint_naming = number, True


def train_batches(accelerator, net, optimizer, batches):
    """Train on this number of batches."""
    for _ in range(batches):
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.ones(4, 1)).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def train_in_eval(accelerator, net, loader):
    """Pass over a loader of training with a model in eval(); return its number of steps."""
    net.eval()
    for _ in loader:
        accelerator.backward(net(torch.ones(4, 1)).square().mean())
    net.zero_grad()
    net.train()
    return len(loader)


def evaluate_in_eval(accelerator, net, loader):
    """Return the samples that are gathered with a model in eval(), and the number of batches."""
    net.eval()
    batches = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    net.train()
    return [sample for batch in batches for sample in batch], len(batches)


def main():
    """Lose worker 1 in an evaluation, 2 in a save and, after a load, 0 in a mean."""
    torch.set_num_threads(1)
    project = ProjectConfiguration(str(FOLDER), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        cpu=True, project_config=project, log_with=FileTracker(), gradient_accumulation_steps=2
    )
    accelerator.init_trackers("losses", {"workers": 4})
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    data = torch.utils.data.DataLoader(torch.arange(SAMPLES), batch_size=2)
    trained = torch.utils.data.DataLoader(torch.arange(SAMPLES), batch_size=2)
    net, optimizer, data, trained = accelerator.prepare(net, optimizer, data, trained)
    train = functools.partial(train_batches, accelerator, net, optimizer)
    said = {"evaluated": [], "objects": []}

    def evaluate(loses=None):
        tensors, objects = [], []
        for number, batch in enumerate(data):
            if number == 1:
                die(loses)
            tensors += accelerator.gather_for_metrics(batch).tolist()
            objects += accelerator.gather_for_metrics([f"{each}" for each in batch.tolist()])
        said["evaluated"].append(sorted(tensors))
        said["objects"].append(sorted(map(int, objects)))

    train(3)
    train_in_eval(accelerator, net, trained)
    accelerator.save_state()
    save_alone(accelerator)
    evaluate()
    evaluate(loses=1)
    evaluate()
    said["in eval"], said["rounds"] = evaluate_in_eval(accelerator, net, data)
    said["rounds of training"] = train_in_eval(accelerator, net, trained)
    hook = accelerator.register_save_state_pre_hook(lambda *_: die(2))
    # Worker 2 dies once all have seen that this folder is not there, and the first has made it.
    accelerator.save_state()
    hook.remove()
    accelerator.save_state()
    said["numbers"] = accelerator.save_iteration
    accelerator.log({"loss": 1}, step=1)
    newest = FOLDER / "checkpoints" / "checkpoint_2"
    if accelerator.is_main_process:  # As if one worker had saved.
        (newest / "random_states_1.pkl").unlink()
    accelerator.wait_for_everyone()
    accelerator.step = 0
    accelerator.load_state(str(newest))
    said["step"] = accelerator.step
    train(2)
    die_in_sum(0)
    said["mean"] = accelerator.reduce([torch.tensor(float(FIRST_RANK))], "mean")[0].item()
    train(2)
    accelerator.log({"loss": 2}, step=2)
    accelerator.print(f"printed by {FIRST_RANK}")
    (FOLDER / "said.json").write_text(json.dumps(said))
    accelerator.end_training()


main()
