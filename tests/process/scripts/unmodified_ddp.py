"""An ordinary DDP script without elastane; it writes its state after each step.

Usage: unmodified_ddp.py FOLDER [MODE]: static, sum, gather, muon, ratio, by hand, group, spawn,
rpc, join, async save, end, last save, fails, returns, refused or caught. It ends once a file
"enough" is there. With `sum` it takes the mean of floats of its own in each step, on all workers
and on rank 0, over the world size that it keeps, and saves once; with `gather` it gathers from as
many. Before one of these, rank 1 of the first attempt dies; with `sum` the others have begun their
sum then. With `muon` it dies there, too, and each worker has the momentum of a part of the
parameters. With `ratio` it dies there, and each step ends with an evaluation of a mean for each
class. With `by hand` it averages gradients itself. With `group` it asks for a group of one worker,
with `spawn` it starts a process, with `rpc` it starts torch's RPC, with `join` workers may end
early. With `async save` all workers save together while they train. With `end` rank 1 of the first
attempt dies after it has destroyed the group, then rank 0 before it saves its model; rank 1 of the
second one dies as its interpreter exits. With `fails` rank 1 of the first attempt raises an
exception, and destroys the group in a `finally`; with `returns` it ends its program. With `refused`
all workers sum a type that gloo cannot sum; with `caught` they do so in each step, and rank 1 once
waits for a loss before that. With `last save` rank 0 of the first attempt dies as it saves its
model at the end, and the others wait.
"""

import atexit
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.checkpoint import async_save, save
from torch.nn.parallel import DistributedDataParallel

FOLDER, MODE = Path(sys.argv[1]), "".join(sys.argv[2:])
STEPS_MAX = 100_000
DIES_AT = 3


def is_first_attempt():
    """Whether the workers were not restarted yet."""
    return os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def digest(model):
    """Return a digest of all parameters; each rank's BatchNorm has statistics of its own."""
    state = [each.detach().numpy().tobytes() for each in model.parameters()]
    return hashlib.sha1(b"".join(state)).hexdigest()


class DealtOut(torch.optim.Optimizer):
    """An optimizer that updates a part of the parameters on each worker, as Muon does."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        """Update this worker's part, and receive the updates of the others."""
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            update = torch.zeros_like(parameter)
            if number % dist.get_world_size() == dist.get_rank():
                momentum = self.state[parameter].setdefault("momentum", update.clone())
                update = momentum.mul_(0.9).add_(parameter.grad).clone()
            dist.all_reduce(update)
            parameter.data.add_(update, alpha=-1e-3)


def is_enough():
    """Whether the test has seen enough; all ranks decide alike."""
    enough = torch.tensor([int((FOLDER / "enough").exists())])
    dist.all_reduce(enough, op=dist.ReduceOp.MAX)
    return bool(enough.item())


def mean_of_ones(step, size, optimizer, model):
    """Return the mean of a 1 from each worker, in the modes that compute it; then save once."""
    mean = torch.ones(1)
    is_place = (step, dist.get_rank()) == (DIES_AT, 1) and is_first_attempt()
    if MODE in ("sum", "gather", "muon", "ratio") and is_place:
        others = {FOLDER / f"sums.{rank}" for rank in range(size) if rank != 1}
        while MODE == "sum" and not all(file.exists() for file in others):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "sum":
        with torch.inference_mode():
            mean = torch.ones(1)
            work = dist.all_reduce(mean, async_op=True)
            if step == DIES_AT:
                (FOLDER / f"sums.{dist.get_rank()}").touch()
            work.wait()
            mean /= size
            total = torch.ones(1)
            dist.reduce(total, 0)
            if dist.get_rank() == 0:
                mean = (mean + total / size) / 2
        if step == DIES_AT + 2:
            save({"optimizer": optimizer.state_dict()}, checkpoint_id=FOLDER / "dcp")
    if MODE == "ratio":
        model.eval()
        with torch.no_grad():
            totals, counts = torch.ones(9), torch.ones(9, dtype=torch.int64)
            dist.all_reduce(totals)
            dist.all_reduce(counts)
            mean = (totals / counts).mean()
        model.train()
    if MODE == "gather":
        dist.all_gather([torch.empty(1) for _ in range(dist.get_world_size())], mean)
    return mean.item()


def start_beside():
    """Start a process or torch's RPC, or prepare to die at the end, in the modes that do so."""
    if MODE == "end" and os.environ["RANK"] == "1":  # called after what is registered later
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
    if MODE == "spawn":
        torch.multiprocessing.spawn(print, nprocs=1)
    if MODE == "rpc":
        rpc.init_rpc(f"worker{os.environ['RANK']}", rank=int(os.environ["RANK"]), world_size=2)


def ask_for_some():
    """Request a group or a join that not all workers share, in the modes that do so."""
    if MODE == "group":
        dist.new_group([0])
    if MODE == "join":
        DistributedDataParallel(torch.nn.Linear(1, 1)).join().__enter__()


def save_last(model):
    """Save the model on rank 0, while the others wait."""
    if dist.get_rank() == 0:
        if is_first_attempt():
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save(model.state_dict(), FOLDER / "model.pt")
    dist.barrier()


def save_after_the_end(rank):
    """Save on rank 0 without a group; both workers of the first attempt die before that."""
    if rank == 1 and is_first_attempt():
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        if is_first_attempt():
            (other,) = {int(file.stem) for file in FOLDER.glob("*.jsonl")} - {os.getpid()}
            while Path(f"/proc/{other}").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        (FOLDER / "model.pt").touch()


def end(model):
    """End in the way of the modes that have one."""
    if MODE == "last save":
        save_last(model)
    if MODE == "end":
        rank = dist.get_rank()
        dist.destroy_process_group()
        save_after_the_end(rank)


def call_what_torch_refuses(step, rank):
    """Sum a type that gloo cannot sum; with `caught` rank 1 does so once after a loss."""
    if MODE == "caught" and (step, rank) == (DIES_AT, 1):
        while not (FOLDER / "regrouped").exists():
            time.sleep(0.01)
    with contextlib.suppress(RuntimeError if MODE == "caught" else ()):
        dist.all_reduce(torch.zeros(1, dtype=torch.int16))
    if step == DIES_AT and rank == 0:
        (FOLDER / "caught").touch()


def fail_or_return(step, rank):
    """Return whether this program ends here; raise ValueError in the mode that does so."""
    is_place = (step, rank) == (DIES_AT, 1) and is_first_attempt()
    if MODE == "caught" or (MODE == "refused" and step == DIES_AT):
        call_what_torch_refuses(step, rank)
    if is_place and MODE == "fails":
        raise ValueError("a fault of the script")
    return is_place and MODE == "returns"


def main():
    """Train until the test has seen enough."""
    start_beside()
    dist.init_process_group("gloo")
    ask_for_some()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    trained, size = model, dist.get_world_size()
    if MODE != "by hand":
        is_static = MODE == "static"
        trained = DistributedDataParallel(model, bucket_cap_mb=0.002, static_graph=is_static)
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
    if MODE == "muon":
        optimizer = DealtOut(trained.parameters())
    data = torch.Generator().manual_seed(dist.get_rank())
    with (FOLDER / f"{os.getpid()}.jsonl").open("w") as file:
        for step in range(STEPS_MAX):
            inputs = torch.randn(8, 16, generator=data)
            time.sleep(0.01)
            optimizer.zero_grad()
            loss = (trained(inputs).squeeze(-1) - inputs.sum(1)).square().mean()
            loss.backward()
            for parameter in model.parameters() if MODE == "by hand" else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
            optimizer.step()
            if MODE == "async save":
                async_save({"optimizer": optimizer.state_dict()}, checkpoint_id=FOLDER / "dcp")
            mean = mean_of_ones(step, size, optimizer, trained)
            what = {"step": step, "digest": digest(model), "world": dist.get_world_size()}
            what.update(mean=mean, rank=dist.get_rank())
            file.write(json.dumps(what) + "\n")
            file.flush()
            if fail_or_return(step, dist.get_rank()):
                return
            if is_enough():
                break
    end(model)


try:
    main()
finally:
    if dist.is_initialized():
        dist.destroy_process_group()
