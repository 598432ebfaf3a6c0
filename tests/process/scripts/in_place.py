"""Training in place whose result is one exact number despite faults.

Gradients are sums of integers, so neither their order nor the number of workers matters: each step
adds what each of its samples and its number say. A buffer counts the bodies that happened. Each
body that begins, and each step that is committed, is a line in FOLDER/PID.jsonl. All stop after the
step in which rank 0 finds FOLDER/enough, or after STEPS. One that finds FOLDER/PID.hang, or
FOLDER/rank-RANK.hang, takes that file and hangs as it says. FOLDER/PID.spare is there once a
process waits as a spare. While FOLDER/hold is there, a worker waits between init() and its first
step.

    in_place.py FOLDER STEPS STEP_S
"""

from __future__ import annotations

import ctypes
import json
import os
import pdb
import signal
import socket
import sys
import time
from pathlib import Path

SAMPLES, BATCH, SIZE = 1009, 32, 8


def gradient(step: int, sample: int) -> list[int]:
    """Return the contribution of one sample at a step; it differs for each sample and step."""
    return [(step * 7919 + sample * 104729 + place * 1299709) % 65537 for place in range(SIZE)]


def undisturbed(steps: int) -> list[float]:
    """Return the weights after training without a fault."""
    import elastane

    batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=3).bind(0, 1)
    weights = [0] * SIZE
    while batches.next_step < steps:
        for samples in batches:
            for sample in samples if batches.next_step < steps else ():
                grads = gradient(batches.next_step, sample)
                weights = [w - g for w, g in zip(weights, grads, strict=True)]
            batches.commit()
    return [float(weight) for weight in weights]


class Samples:
    """A dataset in which a worker hangs if the test asked for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> int:
        hang(self.folder, "loader")
        return number


def ordinary(dist, total, group) -> None:
    """Reduce as all other ranks do."""
    dist.all_reduce(total, group=group)


# Collectives that differ from those of the other ranks, instead of the reduction of a step.
ODD = {
    "large": lambda dist, total, group: dist.all_reduce(total.repeat(100), group=group),
    "small": lambda dist, total, group: dist.all_reduce(total[:3], group=group),
    "other": lambda dist, total, group: dist.broadcast(total, src=dist.get_rank(), group=group),
}


def _loop() -> None:
    while True:
        pass


def _abort() -> None:
    from elastane.comms import sockets

    sockets.cut = lambda _inodes: time.sleep(100_000)


def _pdb() -> None:
    sys.stdin = open(os.open(os.environ["HANG_STDIN"], os.O_RDONLY))  # noqa: SIM115
    pdb.Pdb(stdin=sys.stdin).set_trace()


def _receive() -> None:
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())


def _raise() -> None:
    raise ValueError("planted")


HANGS = {
    "loop": _loop,
    "lock": lambda: ctypes.PyDLL(None).sleep(100_000),  # with the interpreter's lock
    "loader": lambda: time.sleep(100_000),
    "sleep": lambda: time.sleep(100_000),
    "disk": lambda: Path(os.environ["HANG_DISK"]).read_bytes(),  # a FIFO without a writer
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "receive": _receive,
    "abort": _abort,
    "pause": lambda: time.sleep(1.6),
    "pdb": _pdb,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raised": _raise,
    "exited": lambda: os._exit(3),
}


def hang(folder: Path, *here: str) -> str:
    """Show the fault for which the test asked this process; return one that is in ODD."""
    names = f"{os.getpid()}.hang", f"rank-{os.environ.get('RANK')}.hang"
    told = next((folder / name for name in names if (folder / name).exists()), folder / names[0])
    how = told.read_text() if told.exists() else ""
    if how not in here:
        return ""
    told.unlink()
    if how in ODD:
        return how
    HANGS[how]()
    return ""


def in_loops(job, loader, steps, say):
    """The steps, in loops of STEPS_PER_LOOP with PAUSE_S after each; in one, by default."""
    per_loop = int(os.environ.get("STEPS_PER_LOOP", steps))
    for end in range(per_loop, steps + 1, per_loop):
        before = job.committed
        yield from job.steps(loader, until_step=end)
        if job.committed > before:
            say("between", job.committed)
            time.sleep(float(os.environ.get("PAUSE_S", "0")))


def variables() -> dict[str, str | None]:
    """Return the environment variables of this worker's ranks."""
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ELASTANE_ROUND", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ.get(name) for name in names}


def build(folder: Path, group) -> None:
    """Construct a DDP, as a worker may before its first step; wait while FOLDER/hold is there."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    (folder / f"{os.getpid()}.building").write_text(json.dumps(variables()))
    DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    while (folder / "hold").exists():
        time.sleep(0.01)


def tell_of_waiting(path: Path) -> None:
    """As a spare, touch `path` once this process has reported to its agent that it is ready."""
    from elastane.process import control_socket

    receive_begin = control_socket.receive_begin

    def waiting(end: socket.socket) -> tuple[control_socket.Begin, int, int]:
        path.touch()
        return receive_begin(end)

    control_socket.receive_begin = waiting


def main() -> None:
    import torch
    import torch.distributed as dist
    import uncompiled  # noqa: F401 - before the optimizer is made

    import elastane

    folder, steps, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end

    waits = os.environ.get("WAIT_FOR_PLACE") != "0"

    def say(what: str, step: int) -> None:
        place = {"rank": job.rank, "world": job.world_size, "round": job.fence.round}
        found = dist.get_rank(), dist.get_world_size(), *variables().values()
        expected = job.rank, job.world_size, str(job.rank), str(job.world_size)
        assert found[:4] == expected and found[5] == str(job.fence.round) and all(found[6:]), found
        log.write(
            json.dumps({"what": what, "step": step, **place, "at_s": time.monotonic()}) + "\n"
        )

    tell_of_waiting(folder / f"{os.getpid()}.spare")
    with elastane.init(wait_for_place=waits, backend=os.environ.get("GPU_BACKEND", "")) as job:
        if waits:
            print("rank", os.environ["RANK"], "local rank", os.environ["LOCAL_RANK"], flush=True)
            say("placed", -1)
        build(folder, job.process_group)
        net = torch.nn.Linear(SIZE, 1, bias=False).to(torch.float64)
        torch.nn.init.zeros_(net.weight)
        net.register_buffer("bodies", torch.zeros(1, dtype=torch.int64))
        net.to(job.device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=3)
        loader = torch.utils.data.DataLoader(Samples(folder), batch_sampler=batches)
        job.track(net=net, optimizer=optimizer)
        for step, samples in in_loops(job, loader, steps, say):
            with step:
                say("body", step.number)
                net.bodies += 1
                odd = hang(folder, *HANGS.keys() - {"loader"}, *ODD)
                mine = [gradient(step.number, int(s)) for s in samples] if step.samples else []
                total = torch.tensor(mine, dtype=torch.float64).reshape(-1, SIZE).sum(dim=0)
                enough = job.rank == 0 and (folder / "enough").exists()
                total = torch.cat([total, torch.tensor([float(enough)], dtype=torch.float64)])
                total = total.to(job.device)
                time.sleep(step_s / 2)
                reduce = ODD.get(odd, ordinary)
                reduce(dist, total, job.process_group)
                net.weight.grad = total[:SIZE].reshape(1, SIZE)
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(step_s / 2)
            if step.committed:
                say("committed", step.number)
                if total[SIZE]:
                    break
        found = {"steps": job.committed, "bodies": int(net.bodies)}
        found["weights"] = net.weight.flatten().tolist()
        (folder / f"{os.getpid()}.final").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
