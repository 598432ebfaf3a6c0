"""The CPUs that each worker is bound to (--numa-binding), as a pure function of the machine.

The modes are those of torch (torch.numa.binding): local rank N is placed with GPU N. Without a
visible GPU torch fails; here the local ranks are spread evenly over the NUMA nodes, in order.
Memory is not bound: it comes from the node of the CPU that writes to it first, as with torch's call
of numactl.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from elastane.errors import ConfigurationError

MODES = ("node", "socket", "exclusive", "core-complex")


@dataclass(frozen=True)
class Topology:
    """The part of one machine that this process may use.

    `nodes`: the CPUs of each NUMA node that has any. `sockets`, `cores`, `caches`: for each CPU its
    socket, the first CPU of its core, and the first CPU that shares its largest cache; absent if
    the kernel does not report it. `gpus`: the NUMA node of each visible GPU, by its number.
    """

    nodes: Mapping[int, frozenset[int]]
    sockets: Mapping[int, int]
    cores: Mapping[int, int]
    caches: Mapping[int, int]
    gpus: tuple[int, ...] = ()


def bind(topology: Topology, mode: str, local_world_size: int) -> tuple[frozenset[int], ...]:
    """Return the CPUs of each local rank; raises ConfigurationError if one would have none."""
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
    """Return a NUMA node for each of `count` workers: neighbours together, nodes used equally."""
    order = list(nodes)
    return tuple(order[index * len(order) // count] for index in range(count))


def unknown_gpu(what: str, next_step: str = "") -> ConfigurationError:
    """Return the error for a local rank whose GPU is not certain."""
    return ConfigurationError(
        f"--numa-binding: {what}",
        slug="numa-unknown-gpu",
        expected="NVIDIA GPUs whose numbers and NUMA nodes are certain",
        next_step=next_step or "no --numa-binding, or numactl in the script that --no-python runs",
    )


def _node(topology: Topology, homes: tuple[int, ...], index: int) -> frozenset[int]:
    return topology.nodes[homes[index]]


def _socket(topology: Topology, homes: tuple[int, ...], index: int) -> frozenset[int]:
    """Return the CPUs of all nodes of the socket; a node belongs to the socket of its first CPU."""

    def socket(node: int) -> int:
        return topology.sockets[min(topology.nodes[node])]

    mine = socket(homes[index])
    return frozenset().union(*(c for node, c in topology.nodes.items() if socket(node) == mine))


def _exclusive(topology: Topology, homes: tuple[int, ...], index: int) -> frozenset[int]:
    """Return a share of the node's whole cores; the first shares are larger if some are left."""
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
    """Return the CPUs that share one largest cache: another one per worker, larger ones first.

    CPUs without a known cache count as one complex of their node.
    """
    _, place = _neighbours(homes, index)
    complexes = _groups(topology.nodes[homes[index]], topology.caches)
    order = sorted(complexes, key=lambda key: (-len(complexes[key]), key))
    return complexes[order[place % len(order)]]


def _neighbours(homes: tuple[int, ...], index: int) -> tuple[int, int]:
    """Return how many local ranks share this one's node, and its index among them."""
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
