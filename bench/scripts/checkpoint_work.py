"""One measurement of checkpoints; its results go to FOLDER/found.json.

checkpoint_work.py single GB FOLDER        saves and loads of one process, ours and torch's
checkpoint_work.py large GB FOLDER         saves of ours alone, beside the disk and a memcpy
checkpoint_work.py memory GB FOLDER        a worker dies; its replacement restores from memory
checkpoint_work.py steps GB FOLDER         steps of 50 ms, with and without a save after each
checkpoint_work.py sharded GB FOLDER       GB on each node: saves, and steps with them
checkpoint_work.py bring GB FOLDER         rank 0's folder has a checkpoint, rank 1's lacks it
"""

import json
import mmap
import os
import shutil
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import elastane
from elastane.snapshots.client import SnapshotClient

TURNS = 5
TENSORS = 128


def timed(action: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    action()
    return time.perf_counter() - begun_s


class Trained:
    """A model and its AdamW state, of this many GB together."""

    def __init__(self, gb: float) -> None:
        rows = max(1, int(gb * 1e9 / 12 / TENSORS / 1000))
        parts = [torch.nn.Parameter(torch.randn(rows, 1000)) for _ in range(TENSORS)]
        # In several modules, because the names of their parts are built again for each state.
        layers = [torch.nn.ParameterList(parts[at : at + 4]) for at in range(0, TENSORS, 4)]
        self.net = torch.nn.ModuleList(layers)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)
        self.bytes = 3 * 4 * rows * 1000 * TENSORS

    def step(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        self.optimizer.step()

    def objects(self) -> dict:
        return {"net": self.net, "optimizer": self.optimizer}

    def state(self) -> dict:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}


def durable(path: Path, state: dict) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def saves(trained: Trained, folder: Path, of_memcpy: float = 1.0) -> dict[str, list[float]]:
    """Save repeatedly, in turn with a copy of a part of the state, extrapolated to the whole.

    They are measured apart from the peers, whose remains in the kernel slow the memory.
    """
    found: dict[str, list[float]] = {}
    checkpointer = elastane.Checkpointer(folder / "ck", keep=1)
    checkpointer.restore(trained.objects())
    checkpointer.save(1)
    checkpointer.wait()
    copier = checkpointer._saver.copier
    count = int(trained.bytes * of_memcpy) // 4
    one, other = torch.randn(count), torch.randn(count)

    def note(name: str, action: Callable[[], object], times: float = 1.0) -> None:
        found.setdefault(name, []).append(times * timed(action))

    for number in range(2, TURNS + 2):
        idle(checkpointer)
        note("memcpy", partial(one.copy_, other), 1 / of_memcpy)
        copier.may_overlap = False
        note("ours, at once", partial(checkpointer.save, 2 * number))
        note("ours, written", checkpointer.wait)
        idle(checkpointer)
        copier.may_overlap = True
        note("ours, during the next step", partial(checkpointer.save, 2 * number + 1))
        checkpointer.wait()
    idle(checkpointer)
    checkpointer.close()
    return found


def single(gb: float, folder: Path) -> dict:
    trained = Trained(gb)
    trained.step()
    found = saves(trained, folder)

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for _ in range(TURNS):
        note("torch.save, durable", timed(lambda: durable(folder / "one.pt", trained.state())))
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        note("dcp.save", timed(lambda: dcp.save(trained.state(), checkpoint_id=folder / "dcp")))
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        saving = []
        begun_s = time.perf_counter()
        saving.append(dcp.async_save(trained.state(), checkpoint_id=folder / "dcp"))
        note("dcp.async_save, blocked", time.perf_counter() - begun_s)
        saving[0].result()
        note("dcp.async_save, written", time.perf_counter() - begun_s)
    stored = elsewhere(folder)
    for _ in range(TURNS):
        note("torch.load", timed(lambda: torch.load(folder / "one.pt", weights_only=True)))
        note("ours, from storage", from_storage(stored, Trained(gb)))
        fresh = Trained(gb)

        def load(fresh: Trained = fresh) -> None:
            state = torch.load(folder / "one.pt", weights_only=True)
            fresh.net.load_state_dict(state["net"])
            fresh.optimizer.load_state_dict(state["optimizer"])

        note("torch.load, into the objects", timed(load))
    return found


def large(gb: float, folder: Path) -> dict:
    """Save a state that leaves no room for the peers; then write the same amount to the disk."""
    trained = Trained(gb)
    trained.step()
    found = saves(trained, folder, of_memcpy=0.25)
    found["raw disk"] = [timed(lambda: raw_write(folder / "raw", trained.bytes)) for _ in "123"]
    return found


def raw_write(path: Path, size: int) -> None:
    """Write bytes past the page cache, one block after the other, and make them durable."""
    block = mmap.mmap(-1, 16 << 20)
    block.write(os.urandom(len(block)))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    for at in range(0, size, len(block)):
        os.pwrite(descriptor, block, at)
    os.fsync(descriptor)
    os.close(descriptor)
    path.unlink()


def elsewhere(folder: Path) -> Path:
    """Use checkpoints of which the snapshot server holds nothing in memory."""
    return Path(shutil.copytree(folder / "ck", folder / "elsewhere"))


def from_storage(where: Path, trained: Trained) -> float:
    """Restore into the state; return the seconds."""
    checkpointer, restored = elastane.Checkpointer(where), []
    took_s = timed(lambda: restored.append(checkpointer.restore(trained.objects())))
    assert restored[0].where == str(where), restored
    checkpointer.close()
    return took_s


def idle(checkpointer: elastane.Checkpointer) -> None:
    while checkpointer._saver.server.progress().busy:
        time.sleep(0.005)


def memory(gb: float, folder: Path) -> dict:
    """Time the first restore of each of many processes, because a replacement's memory is cold."""
    trained = Trained(gb)
    checkpointer = elastane.Checkpointer(folder / "ck")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # So that the snapshot server does not take the workers for gone meanwhile.
    server = SnapshotClient.connect(str(folder / "ck"))
    if attempt and attempt % 2 == 0:
        took_s = timed(lambda: load(trained, folder))
        note(folder, "torch.load, into the objects", took_s)
        note(folder, "torch.load, and a step", took_s + timed(trained.step))
    took_s = timed(lambda: checkpointer.restore(trained.objects()))
    if attempt == 0:
        trained.step()
        durable(folder / "one.pt", trained.state())
        checkpointer.save(1)
        checkpointer.wait()
    elif attempt % 2:
        note(folder, "ours, from memory", took_s)
        # Tensors in the snapshot's memory get their own memory meanwhile.
        note(folder, "ours, and a step", took_s + timed(trained.step))
    if attempt < 2 * TURNS:
        os.kill(os.getpid(), 9)
    server.close()
    return json.loads((folder / "took").read_text())


def load(trained: Trained, folder: Path) -> None:
    """Restore as a restarted script does."""
    state = torch.load(folder / "one.pt", weights_only=True)
    trained.net.load_state_dict(state["net"])
    trained.optimizer.load_state_dict(state["optimizer"])


def note(folder: Path, name: str, took_s: float) -> None:
    path = folder / "took"
    found = json.loads(path.read_text()) if path.exists() else {}
    found.setdefault(name, []).append(took_s)
    path.write_text(json.dumps(found))


def steps(gb: float, folder: Path) -> dict:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    trained = Trained(gb)
    trained.step()
    checkpointer = elastane.Checkpointer(folder / "ck", every_steps=1)
    checkpointer.restore(trained.objects())
    number, found = 0, {"without": [], "with": []}
    one = torch.ones(1)
    for block in range(2 * TURNS + 2):
        saves = block % 2 == 1
        took = []
        for _ in range(40):
            begun_s = time.perf_counter()
            time.sleep(0.05)  # the work of a device
            dist.all_reduce(one)
            trained.step()
            number += 1
            if saves:
                checkpointer.maybe_save(number)
            took.append(time.perf_counter() - begun_s)
        if block > 1:
            found["with" if saves else "without"].append(statistics.fmean(took))
    checkpointer.close()
    rank = dist.get_rank()
    dist.barrier()
    return found if rank == 0 else {}


class Sharded:
    """A model and its AdamW state of this many GB on this rank, sharded over all."""

    def __init__(self, gb: float) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        rows = max(1, int(gb * 1e9 / 12 / TENSORS / 1000))
        parts = [torch.randn(rows, 1000) for _ in range(3 * TENSORS)]
        self.parts = [DTensor.from_local(part, mesh, [Shard(0)]) for part in parts]
        self.gb = gb

    def step(self) -> None:
        self.parts[0].to_local().add_(1e-3)

    def state_dict(self) -> dict:
        return {str(number): part for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict) -> None:
        raise AssertionError("nothing is restored here")


def sharded(gb: float, folder: Path) -> dict:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    held, one = Sharded(gb), torch.ones(1)
    checkpointer = elastane.Checkpointer(folder / "ck", every_steps=1, keep=1)
    checkpointer.restore({"held": held})
    checkpointer.save(1)
    checkpointer.wait()
    found: dict[str, list[float]] = {"blocked": [], "copied": [], "steps": []}
    number = 1
    for _ in range(TURNS):
        idle(checkpointer)
        dist.all_reduce(one)
        number += 1
        begun_s = time.perf_counter()
        checkpointer.maybe_save(number)
        found["blocked"].append(time.perf_counter() - begun_s)
        checkpointer._finish_copies()
        while checkpointer._saver.server.progress().copying:
            time.sleep(0.002)
        found["copied"].append(time.perf_counter() - begun_s)
    for _ in range(TURNS if gb < 0.5 else 0):
        took = []
        for _ in range(40):
            begun_s = time.perf_counter()
            time.sleep(0.05)  # the work of a device
            dist.all_reduce(one)
            held.step()
            number += 1
            checkpointer.maybe_save(number)
            took.append(time.perf_counter() - begun_s)
        found["steps"].append(statistics.fmean(took))
    checkpointer.close()
    dist.barrier()
    return found if dist.get_rank() == 0 else {}


def bring(gb: float, folder: Path) -> dict:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, list[float]] = {"raw socket": [], "ours": []}
    if rank == 0:
        elastane.save_checkpoint(folder / "own0", {"x": torch.randn(int(gb * 1e9 / 4))}, step=1)
    dist.barrier()
    from elastane.checkpoint.members import GroupMembers
    from elastane.checkpoint.reading import CheckpointTransfer
    from elastane.storage import open_storage

    for _ in range(TURNS):
        shutil.rmtree(folder / "own1", ignore_errors=True)
        (folder / "own1").mkdir(exist_ok=True)
        dist.barrier()
        name = next(path.name for path in (folder / "own0").glob("step-*"))
        storage = open_storage(str(folder / f"own{rank}"))
        sending = CheckpointTransfer(GroupMembers(dist.group.WORLD), storage, name)
        found["ours"].append(timed(lambda s=sending: s.run(0, [1])))
        dist.barrier()
        if rank == 0:
            found["raw socket"].append(raw_copy(folder / "own0" / name / "__0_0.distcp", folder))
        dist.barrier()
    return found if rank == 0 else {}


def raw_copy(path: Path, folder: Path) -> float:
    """Send a file over loopback and write it durably on the other side."""
    listener = socket.create_server(("127.0.0.1", 0))
    size = path.stat().st_size

    def receive() -> None:
        end, _ = listener.accept()
        memory = memoryview(bytearray(16 << 20))
        with (folder / "raw").open("wb", buffering=0) as file:
            while count := end.recv_into(memory):
                file.write(memory[:count])
            os.fsync(file.fileno())

    thread = threading.Thread(target=receive)
    thread.start()
    begun_s = time.perf_counter()
    with socket.create_connection(listener.getsockname()) as end, path.open("rb") as file:
        sent = 0
        while sent < size:
            sent += os.sendfile(end.fileno(), file.fileno(), sent, size - sent)
    thread.join()
    took_s = time.perf_counter() - begun_s
    listener.close()
    (folder / "raw").unlink()
    return took_s


if __name__ == "__main__":
    mode, size, where = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    modes = {each.__name__: each for each in (single, large, memory, steps, sharded, bring)}
    result = modes[mode](size, where)
    if result:
        (where / "found.json").write_text(json.dumps(result))
