"""The machine in /sys and /proc, read from invented folders."""

import os

import pytest

from elastane.errors import ConfigurationError
from elastane.process.topology import parse_list, read_topology, visible_gpus


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Two nodes of two CPUs; the last CPU may not be used."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    for cpu in range(4):
        at = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        write(at / "topology/physical_package_id", cpu // 2)
        write(at / "topology/thread_siblings_list", f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}")
        for level, kind, shared in (
            (1, "Data", cpu),
            (3, "Unified", "0-3"),
            (4, "Instruction", cpu),
        ):
            write(at / f"cache/index{level}/type", kind)
            write(at / f"cache/index{level}/level", level)
            write(at / f"cache/index{level}/shared_cpu_list", shared)
    for node, cpus in enumerate(("0-1", "2-3", "")):
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", cpus)
    return tmp_path


def add_gpu(root, number, *, node, model="H200", address=None):
    address = address or f"0000:{number + 1:02x}:00.0"
    told = (
        f"Model:\t\t{model}\nGPU UUID:\tGPU-{number}f\n"
        f"Bus Location:\t{address}\nDevice Minor:\t{number}"
    )
    write(root / f"proc/driver/nvidia/gpus/{address}/information", told)
    write(root / f"sys/bus/pci/devices/{address[-12:]}/numa_node", node)
    write(root / f"dev/nvidia{number}", "")


def test_cpus_are_grouped_by_node_socket_core_and_largest_data_cache(root):
    there = read_topology({}, root)
    assert there.nodes == {0: {0, 1}, 1: {2}}, "a node of memory alone has no CPUs to bind to"
    assert there.sockets == {0: 0, 1: 0, 2: 1}
    assert there.cores == {0: 0, 1: 0, 2: 2}
    assert there.caches == {0: 0, 1: 0, 2: 0}
    assert there.gpus == ()


def test_a_kernel_without_topology_gives_one_node(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    there = read_topology({}, tmp_path)
    assert there.nodes == {0: {0, 1}}
    assert (there.cores, there.caches) == ({0: 0, 1: 1}, {})


def test_gpus_are_in_the_order_of_their_addresses_with_the_node_of_each(root):
    add_gpu(root, 1, node=1, address="0000:01:00.0")
    add_gpu(root, 0, node=0, address="00000000:B1:00.0".lower())
    assert read_topology({}, root).gpus == (0, 1)


@pytest.mark.parametrize(
    ("listed", "numbers"),
    [("2,0", [2, 0]), ("GPU-1,GPU-0", [1, 0]), ("", []), ("-1", []), ("0,9,1", [0]), ("1,1", [1])],
)
def test_the_devices_variable_chooses_and_orders_as_cuda_reads_it(root, listed, numbers):
    for number in range(3):
        add_gpu(root, number, node=0)
    found = visible_gpus({"CUDA_VISIBLE_DEVICES": listed}, root)
    assert [int(gpu.minor) for gpu in found] == numbers


def test_a_gpu_that_this_container_has_no_device_of_is_not_counted(root):
    add_gpu(root, 0, node=0)
    add_gpu(root, 1, node=1)
    (root / "dev/nvidia0").unlink()
    assert read_topology({}, root).gpus == (1,)


def test_gpus_of_several_models_need_a_certain_order(root):
    add_gpu(root, 0, node=0)
    add_gpu(root, 1, node=1, model="A2")
    with pytest.raises(ConfigurationError, match="several models") as caught:
        read_topology({}, root)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in caught.value.next_step
    assert read_topology({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, root).gpus == (0, 1)
    assert read_topology({"CUDA_VISIBLE_DEVICES": "GPU-1f"}, root).gpus == (1,)


def test_uncertain_gpu_numbers_are_refused(root):
    add_gpu(root, 0, node=-1)
    with pytest.raises(ConfigurationError, match="firmware does not report") as caught:
        read_topology({}, root)
    assert caught.value.slug == "numa-unknown-gpu"
    with pytest.raises(ConfigurationError, match="part of a GPU: MIG-7"):
        read_topology({"CUDA_VISIBLE_DEVICES": "MIG-7"}, root)
    assert read_topology({"CUDA_VISIBLE_DEVICES": ""}, root).gpus == ()


def test_devices_that_the_driver_does_not_list_are_refused(root):
    write(root / "dev/kfd", "")
    with pytest.raises(ConfigurationError, match="/dev/kfd"):
        read_topology({}, root)
    assert read_topology({"CUDA_VISIBLE_DEVICES": ""}, root).gpus == ()


def test_lists_of_cpus_are_read_as_the_kernel_writes_them():
    assert parse_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_list("\n") == frozenset()
