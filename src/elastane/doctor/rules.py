"""The findings about a node, each with its remedy.

Pure: `facts` reads, and this judges. A fault keeps a job from starting or from training; a warning
is what ends jobs later, or makes them slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from elastane.protocol.words import counted

# The versions of torch that the tests have run on.
TESTED_TORCH = ("2.11", "2.13")
OLDEST_TORCH = (2, 4)
_MIB, _GIB = 1 << 20, 1 << 30
# Docker gives a container 64 MiB. 256 images of 224 x 224 pixels in floats are 147 MiB.
SHARED_MEMORY_MIN = _GIB
# A data loader passes each tensor by a descriptor of its own.
DESCRIPTORS_MIN = 4096
# A worker's own threads, those of its data loaders, and its share of agent and zygote.
PROCESSES_PER_WORKER = 256
MEMORY_PER_WORKER_MIN = 2 * _GIB
DISK_FAULT, DISK_WARNING = 100 * _MIB, 2 * _GIB
INODES_MIN = 1000
# Far longer than a local disk takes to sync 1 MiB.
SYNC_WARNING_S = 0.5
GPU_USED_WARNING = 0.1
IMPORT_WARNING_S = 30.0


class Level(StrEnum):
    """How bad a finding is."""

    GOOD = "good"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `why` and `next_step` are empty where all is good."""

    subject: str
    level: Level
    found: str
    why: str = ""
    next_step: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """The facts about torch, from a fresh interpreter. `error`: why it cannot be imported."""

    error: str = ""
    version: str = ""
    import_s: float = 0.0
    cuda: str = ""  # the version of CUDA that it was built with; empty: none
    devices: tuple[str, ...] = ()  # that torch can use
    has_distributed: bool = True
    nccl: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU as its driver shows it; bytes."""

    index: int
    name: str
    memory: int
    used: int
    uncorrected: int = 0  # uncorrected memory errors since the driver was loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A folder that a job writes to. `error`: why it cannot; times in seconds, sizes in bytes."""

    use: str
    path: str
    error: str = ""
    free: int = 0
    free_inodes: int | None = None  # None: this file system has no such bound
    sync_s: float = 0.0
    locks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFacts:
    """The result of a connection to the rendezvous endpoint."""

    endpoint: str
    addresses: tuple[str, ...] = ()  # that its host resolves to here
    is_here: bool = False
    outcome: str = ""  # "connected", "refused", "timeout", or the error of resolving


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts about this node. None: the system does not report it; sizes in bytes."""

    workers: int
    python: str
    elastane: str
    torch: TorchFacts
    kernel: str
    missing_calls: tuple[str, ...]  # system calls that the agent needs and does not have
    gpus: tuple[GpuFacts, ...]
    gpu_error: str  # why the driver's own command failed; empty: it did not, or there is none
    shared_memory: int | None
    shared_memory_error: str = ""  # why it cannot be written
    descriptors: int  # the hard limit: agents and workers raise theirs up to it
    soft_descriptors: int
    processes_left: int | None
    cpus: float
    host_cpus: int
    memory: int  # available, by the host and the cgroup
    host: str
    host_addresses: tuple[str, ...]  # that the host's own name resolves to
    own_addresses: tuple[str, ...]  # of its interfaces, without loopback
    interface: str  # of the default route; empty: none
    gloo_card: str = ""  # the value of GLOO_SOCKET_IFNAME
    gloo_error: str = ""  # why gloo cannot listen at that card
    clock_is_synchronized: bool | None
    folders: tuple[FolderFacts, ...]
    endpoint: EndpointFacts | None


def judge(facts: NodeFacts) -> list[Finding]:
    """Return all findings, in the order of the subjects."""
    return [finding for rule in _RULES for finding in rule(facts)]


def _software(facts: NodeFacts) -> Iterator[Finding]:
    text = f"elastane {facts.elastane}, Python {facts.python}, Linux {facts.kernel}"
    if facts.missing_calls:
        names = ", ".join(facts.missing_calls)
        yield Finding(
            "system",
            Level.FAULT,
            f"{text}, without {names}",
            "the agent waits for its workers by these calls; Linux has them since 5.3, and some"
            " sandboxes refuse them",
            "use Linux 5.3 or later, and a seccomp profile that permits them",
        )
        return
    yield Finding("system", Level.GOOD, text)


def _torch(facts: NodeFacts) -> Iterator[Finding]:
    torch = facts.torch
    if torch.error:
        yield Finding(
            "torch",
            Level.FAULT,
            f"cannot be imported: {torch.error}",
            "workers of this node would end as they start",
            "pip install torch, in the environment of this elastane",
        )
        return
    build = f"CUDA {torch.cuda}" if torch.cuda else "no CUDA"
    build += f", NCCL {torch.nccl}" if torch.nccl else ""
    text = f"{torch.version} ({build}), imported in {torch.import_s:.1f} s"
    if not torch.has_distributed:
        yield Finding(
            "torch",
            Level.FAULT,
            f"{text}, without torch.distributed",
            "workers could form no process group",
            "install a build of torch with USE_DISTRIBUTED=1, as those of pip are",
        )
    elif _release(torch.version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield Finding(
            "torch",
            Level.FAULT,
            text,
            f"elastane needs torch {oldest} or later",
            f"pip install 'torch>={oldest}'",
        )
    elif torch.import_s > IMPORT_WARNING_S:
        yield Finding(
            "torch",
            Level.WARNING,
            text,
            "the first start of each job takes as long: its files are on a slow disk or a network"
            " file system",
            "put the environment on a local disk, or into the container's image",
        )
    elif torch.version.startswith(tuple(f"{one}." for one in TESTED_TORCH)):
        yield Finding("torch", Level.GOOD, text)
    else:
        yield Finding(
            "torch",
            Level.WARNING,
            text,
            f"elastane was tested with {' and '.join(TESTED_TORCH)}; recovery in place uses parts"
            " of torch that others may lack, and says so as a job starts",
            "nothing, if your job trains; kill a worker of it once to be sure",
        )


def _release(version: str) -> tuple[int, ...]:
    words = version.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int(word) for word in words if word.isdigit())


def _gpus(facts: NodeFacts) -> Iterator[Finding]:
    if facts.gpu_error:
        yield Finding(
            "GPUs",
            Level.FAULT,
            f"nvidia-smi: {facts.gpu_error}",
            "the driver does not answer; workers that use a GPU hang in it, unkillably",
            "read dmesg for Xid, then restart the node",
        )
        return
    count = len(facts.gpus)
    seen = len(facts.torch.devices)
    if count and not facts.torch.error and not facts.torch.cuda:
        yield Finding(
            "GPUs",
            Level.FAULT,
            f"{count} of {facts.gpus[0].name}, and a torch without CUDA",
            "workers would train on the CPU",
            "pip install torch, from the index of your CUDA version (pytorch.org)",
        )
    elif count and seen < count and not facts.torch.error:
        yield Finding(
            "GPUs",
            Level.WARNING if seen else Level.FAULT,
            f"torch can use {seen} of {count}",
            "CUDA_VISIBLE_DEVICES hides the others, or the driver is older than torch's CUDA",
            "echo $CUDA_VISIBLE_DEVICES; nvidia-smi",
        )
    elif count:
        yield Finding("GPUs", Level.GOOD, f"{count} of {facts.gpus[0].name}")
    else:
        yield Finding("GPUs", Level.GOOD, "none: workers train on the CPU")
    for gpu in facts.gpus:
        if gpu.uncorrected:
            yield Finding(
                f"GPU {gpu.index}",
                Level.FAULT,
                f"{gpu.uncorrected} uncorrected memory errors since the driver was loaded",
                "weights may be wrong, and workers end with CUDA errors",
                f"nvidia-smi --gpu-reset -i {gpu.index}, or leave this node out",
            )
        if gpu.used > GPU_USED_WARNING * gpu.memory:
            yield Finding(
                f"GPU {gpu.index}",
                Level.WARNING,
                f"{_size(gpu.used)} of {_size(gpu.memory)} in use",
                "another job, or a worker that was left behind, holds memory of it",
                "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
            )


def _memory(facts: NodeFacts) -> Iterator[Finding]:
    if facts.shared_memory is not None and facts.shared_memory_error:
        yield Finding(
            "shared memory",
            Level.WARNING,
            f"/dev/shm: {facts.shared_memory_error}",
            "the workers of data loaders pass batches there, and fail where it cannot be written",
            "mount -o remount,rw,mode=1777 /dev/shm; for a container: --shm-size=8g",
        )
    elif facts.shared_memory is None or facts.shared_memory < SHARED_MEMORY_MIN:
        size = "none" if facts.shared_memory is None else _size(facts.shared_memory)
        yield Finding(
            "shared memory",
            Level.WARNING,
            f"/dev/shm: {size}",
            "the workers of data loaders pass batches there, and end with a bus error where it is"
            " full",
            "docker run --shm-size=8g, or elastane kubernetes render --shm 8Gi",
        )
    else:
        yield Finding("shared memory", Level.GOOD, f"/dev/shm: {_size(facts.shared_memory)} free")
    needed = facts.workers * MEMORY_PER_WORKER_MIN
    text = f"{_size(facts.memory)} available for {counted(facts.workers, 'worker')}"
    if facts.memory < needed:
        yield Finding(
            "memory",
            Level.WARNING,
            text,
            f"less than {_size(MEMORY_PER_WORKER_MIN)} for each worker; the kernel kills workers"
            " when memory is gone",
            "fewer workers (--nproc-per-node), or a higher limit of the container",
        )
    else:
        yield Finding("memory", Level.GOOD, text)


def _limits(facts: NodeFacts) -> Iterator[Finding]:
    text = f"{facts.soft_descriptors} files can be open, {facts.descriptors} on request"
    if facts.soft_descriptors < DESCRIPTORS_MIN:
        yield Finding(
            "open files",
            Level.WARNING,
            text,
            "data loaders hold a file open for each tensor that is on its way, and workers end with"
            " `Too many open files`",
            f"ulimit -n {min(65536, max(facts.descriptors, DESCRIPTORS_MIN))}, before elastane run",
        )
    else:
        yield Finding("open files", Level.GOOD, text)
    needed = facts.workers * PROCESSES_PER_WORKER
    if facts.processes_left is not None and facts.processes_left < needed:
        yield Finding(
            "processes",
            Level.WARNING,
            f"{facts.processes_left} more processes and threads are permitted",
            f"each worker may need {PROCESSES_PER_WORKER}, and ends with `can't start new thread`",
            "ulimit -u, or the container's pids limit (docker run --pids-limit)",
        )
    cpus = f"{facts.cpus:g} of {facts.host_cpus}"
    if facts.cpus < facts.workers:
        yield Finding(
            "CPUs",
            Level.WARNING,
            f"{cpus} for {counted(facts.workers, 'worker')}",
            "workers take turns on a CPU, and each waits for the slowest",
            "fewer workers (--nproc-per-node), or a higher limit of the container",
        )
    else:
        yield Finding("CPUs", Level.GOOD, cpus)


def _network(facts: NodeFacts) -> Iterator[Finding]:
    found = ", ".join(facts.host_addresses)
    if facts.gloo_error:
        yield Finding(
            "gloo",
            Level.FAULT,
            f"GLOO_SOCKET_IFNAME={facts.gloo_card}: {facts.gloo_error}",
            "workers of this node would fail to make a process group",
            f"export GLOO_SOCKET_IFNAME={facts.interface or 'CARD'}; ip address lists the cards",
        )
    elif facts.gloo_card:
        yield Finding("gloo", Level.GOOD, f"listens at GLOO_SOCKET_IFNAME={facts.gloo_card}")
    elif not facts.host_addresses:
        yield _name_finding(facts, f"the host's name {facts.host} does not resolve here")
    elif facts.own_addresses and not set(facts.host_addresses) & set(facts.own_addresses):
        yield _name_finding(facts, f"the host's name {facts.host} is {found} here")
    else:
        yield Finding("host name", Level.GOOD, f"{facts.host} is {found}")
    if facts.endpoint is not None:
        yield _endpoint(facts.endpoint)


def _name_finding(facts: NodeFacts, found: str) -> Finding:
    remedy = f"export GLOO_SOCKET_IFNAME={facts.interface}" if facts.interface else ""
    return Finding(
        "host name",
        Level.WARNING,
        found,
        "gloo listens at the address of the host's name in scripts that call init_process_group"
        " themselves, and workers of other nodes do not find it there",
        remedy or f"give {facts.host} its address in /etc/hosts",
    )


def _endpoint(facts: EndpointFacts) -> Finding:
    where = f"{facts.endpoint} is {', '.join(facts.addresses)}"
    if facts.outcome == "connected":
        return Finding("rendezvous", Level.GOOD, f"{where}, and a process listens there")
    if facts.outcome == "refused":
        who = "this node: it will listen" if facts.is_here else "and that node listens once it has"
        who += "" if facts.is_here else " started"
        return Finding("rendezvous", Level.GOOD, f"{where}, {who}")
    if facts.outcome == "timeout":
        return Finding(
            "rendezvous",
            Level.FAULT,
            f"{where}, and does not answer",
            "a firewall drops what is sent there, the node is off, or the address is another one's",
            f"open the port for this node; try nc -vz {facts.endpoint.replace(':', ' ')}",
        )
    return Finding(
        "rendezvous",
        Level.FAULT,
        f"{facts.endpoint}: {facts.outcome}",
        "this node could not reach the others",
        "a name that DNS or /etc/hosts of every node knows, or an address",
    )


def _clock(facts: NodeFacts) -> Iterator[Finding]:
    if facts.clock_is_synchronized is False:
        yield Finding(
            "clock",
            Level.WARNING,
            "is not synchronized, as far as the kernel knows",
            "times of several nodes cannot be compared in logs; membership does not depend on it",
            "timedatectl set-ntp true, if no other program sets the clock of this host",
        )
    elif facts.clock_is_synchronized:
        yield Finding("clock", Level.GOOD, "is synchronized")


def _folders(facts: NodeFacts) -> Iterator[Finding]:
    for folder in facts.folders:
        yield _folder(folder)


def _folder(folder: FolderFacts) -> Finding:
    def finding(level: Level, found: str, why: str, next_step: str) -> Finding:
        return Finding(folder.use, level, f"{folder.path}: {found}", why, next_step)

    free = f"{_size(folder.free)} free"
    if folder.error:
        return finding(Level.FAULT, folder.error, "a job writes there", f"ls -ld {folder.path}; id")
    has_few_inodes = folder.free_inodes is not None and folder.free_inodes < INODES_MIN
    if folder.free < DISK_FAULT or has_few_inodes:
        inodes = "" if folder.free_inodes is None else f", {folder.free_inodes} files more"
        return finding(Level.FAULT, free + inodes, "a job writes there", f"du -sh {folder.path}/*")
    if not folder.locks:
        return finding(
            Level.FAULT,
            f"{free}, and no file locks",
            "two processes would write at once: of a file store, or of one job's checkpoints",
            "mount it with locks (NFS 4, or lustre with -o flock)",
        )
    if folder.free < DISK_WARNING:
        return finding(
            Level.WARNING, free, "one checkpoint of a large model is more", f"df -h {folder.path}"
        )
    if folder.sync_s > SYNC_WARNING_S:
        return finding(
            Level.WARNING,
            f"{free}; 1 MiB was on disk after {folder.sync_s:.1f} s",
            "saves and events wait for it",
            "another folder, on a faster disk",
        )
    return Finding(folder.use, Level.GOOD, f"{folder.path}: {free}")


_RULES: tuple[Callable[[NodeFacts], Iterator[Finding]], ...] = (
    _software, _torch, _gpus, _memory, _limits, _network, _clock, _folders,
)  # fmt: skip


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 10 or unit == "bytes" else f"{count:.1f} {unit}"
