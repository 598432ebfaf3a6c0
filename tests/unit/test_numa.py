"""The CPUs that a worker is bound to, on invented machines."""

import pytest

from elastane.errors import ConfigurationError
from elastane.process.numa import Topology, bind, spread


def machine(nodes=2, cores=8, *, sockets=None, gpus=(), caches=1, threads=2):
    """`nodes` of `cores` cores; the second threads follow after all the first ones, as on x86."""
    total = nodes * cores
    home = {
        thread * total + node * cores + core: (node, node * cores + core, core * caches // cores)
        for thread in range(threads)
        for node in range(nodes)
        for core in range(cores)
    }
    return Topology(
        nodes={n: frozenset(c for c, at in home.items() if at[0] == n) for n in range(nodes)},
        sockets={c: at[0] * (sockets or nodes) // nodes for c, at in home.items()},
        cores={c: at[1] for c, at in home.items()},
        caches={c: at[0] * caches + at[2] for c, at in home.items()},
        gpus=tuple(gpus),
    )


EIGHT_GPUS = (0, 0, 0, 0, 1, 1, 1, 1)


def test_node_binds_to_all_cpus_of_the_node_of_the_gpu_with_the_number_of_the_local_rank():
    there = machine(gpus=(1, 0, 1))
    assert bind(there, "node", 2) == (there.nodes[1], there.nodes[0])


def test_socket_binds_to_all_nodes_of_the_socket():
    there = machine(nodes=4, sockets=2, gpus=(0, 3))
    assert bind(there, "socket", 2) == (
        there.nodes[0] | there.nodes[1],
        there.nodes[2] | there.nodes[3],
    )


def test_exclusive_gives_each_gpu_whole_cores_of_its_own_and_all_of_them():
    there = machine(cores=10, gpus=EIGHT_GPUS)
    bound = bind(there, "exclusive", 8)
    assert frozenset().union(*bound) == there.nodes[0] | there.nodes[1]
    assert sum(map(len, bound)) == 40, "no CPU is given twice"
    assert [len(cpus) for cpus in bound[:4]] == [6, 6, 4, 4], "the first have one core more"
    assert bound[0] == {0, 1, 2, 20, 21, 22}


def test_exclusive_leaves_the_cores_of_gpus_without_a_worker_alone():
    there = machine(gpus=EIGHT_GPUS)
    assert bind(there, "exclusive", 2) == bind(there, "exclusive", 8)[:2]


def test_exclusive_refuses_more_workers_than_cores():
    with pytest.raises(ConfigurationError, match="2 cores on NUMA node 0 for 3") as caught:
        bind(machine(nodes=1, cores=2), "exclusive", 3)
    assert caught.value.slug == "numa-binding"


def test_core_complex_gives_each_worker_of_a_node_another_cache_largest_first():
    there = machine(nodes=1, caches=2, gpus=(0, 0, 0))
    left = {0, 1, 2, 3, 8, 9, 10, 11}
    assert bind(there, "core-complex", 3) == (left, there.nodes[0] - left, left)
    allowed = there.nodes[0] - {0}
    fewer = Topology({0: allowed}, there.sockets, there.cores, there.caches, (0, 0))
    assert bind(fewer, "core-complex", 2) == (there.nodes[0] - left, left - {0})


def test_core_complex_is_the_node_if_caches_are_unknown():
    there = machine(gpus=(1,))
    bare = Topology(there.nodes, there.sockets, there.cores, {}, there.gpus)
    assert bind(bare, "core-complex", 1) == (there.nodes[1],)


def test_workers_without_gpus_are_spread_over_the_nodes_in_order():
    there = machine()
    assert bind(there, "node", 4) == (there.nodes[0],) * 2 + (there.nodes[1],) * 2
    assert len({cpu for cpus in bind(there, "exclusive", 4) for cpu in cpus}) == 32
    assert spread([0, 3], 3) == (0, 0, 3)
    assert spread([0, 1, 2], 2) == (0, 1)
    assert bind(machine(nodes=1), "node", 1) == (machine(nodes=1).nodes[0],)


def test_a_local_rank_without_gpu_is_refused():
    with pytest.raises(ConfigurationError, match="3 workers, and 2 visible GPUs"):
        bind(machine(gpus=(0, 1)), "node", 3)


def test_a_gpu_whose_node_has_no_cpu_for_us_is_refused():
    there = machine(gpus=(1,))
    only = Topology({0: there.nodes[0]}, there.sockets, there.cores, there.caches, (1,))
    with pytest.raises(ConfigurationError, match="no CPU of NUMA node 1"):
        bind(only, "node", 1)


@pytest.mark.parametrize("mode", ["node", "socket", "exclusive", "core-complex"])
@pytest.mark.parametrize(
    "there",
    [
        machine(gpus=EIGHT_GPUS, cores=10),
        machine(gpus=EIGHT_GPUS, nodes=4, sockets=2, cores=7, caches=3),
        machine(gpus=(1, 0, 1, 0), threads=1, caches=2),
    ],
)
def test_every_mode_binds_as_torch_does(monkeypatch, there, mode):
    binding = pytest.importorskip("torch.numa.binding")
    device = "device" if hasattr(binding, "_get_device_count") else "gpu"  # torch 2.13 says gpu
    tell = {
        f"_get_{device}_count": lambda: len(there.gpus),
        f"_get_numa_node_index_for_{device}_index": lambda **index: there.gpus[
            index[f"{device}_index"]
        ],
        "_get_allowed_logical_cpu_indices_for_numa_node": lambda numa_node_index: set(
            there.nodes[numa_node_index]
        ),
        "_get_systemwide_numa_node_indices": lambda: set(there.nodes),
        "_get_socket_index_for_cpu": lambda cpu_index: there.sockets[cpu_index],
        "_get_logical_cpu_indices_sharing_same_physical_core_as": lambda logical_cpu_index: {
            c for c, core in there.cores.items() if core == there.cores[logical_cpu_index]
        },
        "_get_logical_cpus_sharing_same_max_level_cache_as": lambda logical_cpu_index: {
            c for c, cache in there.caches.items() if cache == there.caches[logical_cpu_index]
        },
    }
    for name, answer in tell.items():
        monkeypatch.setattr(binding, name, answer)
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    theirs = [
        binding._get_logical_cpus_to_bind_to(**{f"{device}_index": index}, numa_options=options)
        for index in range(len(there.gpus))
    ]
    assert list(bind(there, mode, len(there.gpus))) == theirs
