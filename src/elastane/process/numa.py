"""Which CPUs each worker is bound to: --numa-binding, as a pure function of the machine.

The modes mean what they mean in torch (torch.numa.binding): local rank N goes with GPU N. Where no
GPU is visible torch fails; here the local ranks are spread evenly over the NUMA nodes, in order,
and take the part of the GPUs. Memory is not bound: it is taken from the node of the CPU that first
writes to it, which is what torch's call of numactl does too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from elastane.errors import ConfigurationError

MODES = ("node", "socket", "exclusive", "core-complex")


@dataclass(frozen=True)
class Topology:
    """One machine, as far as this process may use it.

    `nodes`: the CPUs of each NUMA node that has any. `sockets`, `cores`, `caches`: for each CPU
    its socket, the first CPU of its core, the first CPU that shares its largest cache (none where
    the kernel does not tell). `gpus`: the NUMA node of each visible GPU, by its number.
    """

    nodes: Mapping[int, frozenset[int]]
    sockets: Mapping[int, int]
    cores: Mapping[int, int]
    caches: Mapping[int, int]
    gpus: tuple[int, ...] = ()


def bind(topology: Topology, mode: str, local_world_size: int) -> tuple[frozenset[int], ...]:
    """Return the CPUs of each local rank; raises ConfigurationError where there are none."""
    homes = topology.gpus or spread(sorted(topology.nodes), local_world_size)
    if len(homes) < local_world_size:
        raise ConfigurationError(
            f"--numa-binding {mode}: {local_world_size} workers, and {len(homes)} visible GPUs",
            slug="numa-binding",
            expected="a GPU for each local rank, by its number",
            next_step=f"--nproc-per-node {len(homes)}, or no --numa-binding",
        )
    for home in homes[:local_world_size]:
        if home not in topology.nodes:
            raise ConfigurationError(
                f"--numa-binding {mode}: no CPU of NUMA node {home} may be used here",
                slug="numa-binding",
                where=f"CPUs may be used of NUMA nodes {sorted(topology.nodes)}",
                expected="CPUs near each GPU",
                next_step="give this container CPUs of all its GPUs' nodes, or no --numa-binding",
            )
    choose = _CHOICES[mode]
    return tuple(choose(topology, homes, index) for index in range(local_world_size))


def spread(nodes: Iterable[int], count: int) -> tuple[int, ...]:
    """Return a NUMA node for each of `count` workers: neighbours together, all nodes alike."""
    order = list(nodes)
    return tuple(order[index * len(order) // count] for index in range(count))


def unknown_gpu(what: str, next_step: str = "") -> ConfigurationError:
    """Return the error where it is not certain which GPU a local rank has."""
    return ConfigurationError(
        f"--numa-binding: {what}",
        slug="numa-unknown-gpu",
        expected="NVIDIA GPUs whose numbers and NUMA nodes are certain",
        next_step=next_step or "no --numa-binding, or numactl in the script that --no-python runs",
    )


def _node(topology: Topology, homes: tuple[int, ...], index: int) -> frozenset[int]:
    return topology.nodes[homes[index]]


def _socket(topology: Topology, homes: tuple[int, ...], index: int) -> frozenset[int]:
    """All nodes of the socket: a node is of the socket that its first CPU is of."""

    def socket(node: int) -> int:
        return topology.sockets[min(topology.nodes[node])]

    mine = socket(homes[index])
    return frozenset().union(*(c for node, c in topology.nodes.items() if socket(node) == mine))


def _exclusive(topology: Topology, homes: tuple[int, ...], index: int) -> frozenset[int]:
    """A share of the node's cores, whole ones; the first shares are larger where some are over."""
    neighbours, place = _neighbours(homes, index)
    cores = _groups(topology.nodes[homes[index]], topology.cores)
    whole = [cores[key] for key in sorted(cores)]
    each, over = divmod(len(whole), neighbours)
    if each < 1:
        raise ConfigurationError(
            f"--numa-binding exclusive: {len(whole)} cores on NUMA node {homes[index]} for"
            f" {neighbours} workers or GPUs",
            slug="numa-binding",
            expected="a core for each",
            next_step="--numa-binding node, by which they share them",
        )
    start = place * each + min(place, over)
    return frozenset().union(*whole[start : start + each + (place < over)])


def _core_complex(topology: Topology, homes: tuple[int, ...], index: int) -> frozenset[int]:
    """The CPUs that share one largest cache, each worker another; the larger ones go first.

    CPUs whose caches are not told count as one complex of their node.
    """
    _, place = _neighbours(homes, index)
    complexes = _groups(topology.nodes[homes[index]], topology.caches)
    order = sorted(complexes, key=lambda key: (-len(complexes[key]), key))
    return complexes[order[place % len(order)]]


def _neighbours(homes: tuple[int, ...], index: int) -> tuple[int, int]:
    """Return how many share this one's node, and its place among them."""
    same = [other for other, home in enumerate(homes) if home == homes[index]]
    return len(same), same.index(index)


def _groups(cpus: frozenset[int], keys: Mapping[int, int]) -> dict[int, frozenset[int]]:
    found: defaultdict[int, set[int]] = defaultdict(set)
    for cpu in cpus:
        found[keys.get(cpu, -1)].add(cpu)
    return {key: frozenset(group) for key, group in found.items()}


_CHOICES: dict[str, Callable[[Topology, tuple[int, ...], int], frozenset[int]]] = {
    "node": _node,
    "socket": _socket,
    "exclusive": _exclusive,
    "core-complex": _core_complex,
}
assert tuple(_CHOICES) == MODES
