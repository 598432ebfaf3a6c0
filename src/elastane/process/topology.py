"""This machine's CPUs, NUMA nodes and GPUs, as /sys and /proc show them.

This module reads and parses; `numa` decides. `root` is prefixed to every path. Facts that a kernel
does not report (caches in a virtual machine) are left out. GPUs are found without CUDA: the NVIDIA
driver lists them, and CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER determine their numbers. If a
number is not certain, it raises ConfigurationError with the cause.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastane.process.numa import Topology, unknown_gpu

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Gpu:
    """One GPU of the driver's list: PCI address, model, UUID and the N of /dev/nvidiaN."""

    address: str
    model: str
    uuid: str
    minor: str


def read_topology(environ: Mapping[str, str], root: Path = Path("/")) -> Topology:
    """Return the facts about this machine that the placement of workers depends on."""
    allowed = frozenset(os.sched_getaffinity(0))
    cpus = root / "sys/devices/system/cpu"
    places = {cpu: cpus / f"cpu{cpu}/topology" for cpu in allowed}
    nodes = _nodes(root, allowed)
    return Topology(
        nodes=nodes,
        sockets={cpu: _number(place / "physical_package_id") for cpu, place in places.items()},
        cores={cpu: _first(place / "thread_siblings_list", cpu) for cpu, place in places.items()},
        caches=_caches(cpus, allowed),
        gpus=tuple(_gpu_node(root, gpu, len(nodes)) for gpu in visible_gpus(environ, root)),
    )


def parse_list(text: str) -> frozenset[int]:
    """Parse a list of /sys such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> list[Gpu]:
    """Return the GPUs that workers see, in the order of their numbers there."""
    gpus = _driver_gpus(root)
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    names = None if listed is None else [name.strip() for name in listed.split(",")]
    if names is not None and (not names[0] or names[0].startswith("-")):
        return []
    if not gpus:
        _refuse_others(root)
        return []
    by_number = names is None or any(name.isdecimal() for name in names)
    if by_number and len({gpu.model for gpu in gpus}) > 1:
        _check_order(environ)
    return gpus if names is None else _chosen(names, gpus)


def _nodes(root: Path, allowed: frozenset[int]) -> dict[int, frozenset[int]]:
    """Return the CPUs of each node that this process may use; a node without CPUs is left out."""
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = parse_list(_text(folder / "cpulist")) & allowed
        if cpus:
            found[int(folder.name[4:])] = cpus
    return found or {0: allowed}


def _caches(cpus: Path, allowed: frozenset[int]) -> dict[int, int]:
    """Return for each CPU the first of the CPUs that share its largest cache."""
    found = {}
    for cpu in allowed:
        best = (0, -1)
        for index in (cpus / f"cpu{cpu}/cache").glob("index[0-9]*"):
            if _text(index / "type").strip() in ("Unified", "Data"):
                shared = parse_list(_text(index / "shared_cpu_list")) or {cpu}
                best = max(best, (_number(index / "level"), min(shared)))
        if best[1] >= 0:
            found[cpu] = best[1]
    return found


def _driver_gpus(root: Path) -> list[Gpu]:
    """Return the NVIDIA driver's GPUs that this process can open, by PCI address."""
    found = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        lines = _text(folder / "information").splitlines()
        pairs = [line.partition(":") for line in lines]
        facts = {key.strip(): value.strip() for key, _, value in pairs}
        gpu = Gpu(
            address=facts.get("Bus Location", folder.name).lower(),
            model=facts.get("Model", ""),
            uuid=facts.get("GPU UUID", ""),
            minor=facts.get("Device Minor", ""),
        )
        if (root / f"dev/nvidia{gpu.minor}").exists():
            found.append(gpu)
    return found


def _refuse_others(root: Path) -> None:
    """Refuse GPUs that exist and cannot be listed: AMD's, WSL's, a driver without /proc."""
    for device in ("nvidia0", "kfd", "dxg"):
        if (root / "dev" / device).exists():
            raise unknown_gpu(
                f"/dev/{device} is there, but no GPU under /proc/driver/nvidia/gpus",
                next_step="CUDA_VISIBLE_DEVICES= where the workers use no GPU",
            )


def _check_order(environ: Mapping[str, str]) -> None:
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise unknown_gpu(
            "GPUs of several models, which CUDA numbers by their speed",
            next_step="CUDA_DEVICE_ORDER=PCI_BUS_ID, by which they are numbered by PCI address",
        )


def _chosen(names: list[str], gpus: list[Gpu]) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names; names after an invalid one are ignored."""
    found: list[Gpu] = []
    for name in names:
        if name.startswith("MIG-"):
            raise unknown_gpu(f"CUDA_VISIBLE_DEVICES names a part of a GPU: {name}")
        if name.isdecimal():
            matches = gpus[int(name) : int(name) + 1]
        else:
            matches = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return found


def _gpu_node(root: Path, gpu: Gpu, nodes: int) -> int:
    if not _ADDRESS.fullmatch(gpu.address):
        raise unknown_gpu(f"the driver reports the address {gpu.address!r} of a GPU")
    domain, _, rest = gpu.address.partition(":")
    node = _number(root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")
    if node < 0 and nodes > 1:
        raise unknown_gpu(f"the firmware does not report the NUMA node of the GPU at {gpu.address}")
    return max(0, node)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else -1


def _first(path: Path, default: int) -> int:
    return min(parse_list(_text(path)), default=default)
