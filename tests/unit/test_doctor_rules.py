"""What the facts about a node mean: each fault and warning has its cause, reason and remedy."""

from dataclasses import replace

import pytest

from elastane.doctor.rules import (
    EndpointFacts,
    FolderFacts,
    GpuFacts,
    Level,
    NodeFacts,
    TorchFacts,
    judge,
)

GIB = 1 << 30
CPU_TORCH = TorchFacts(version="2.13.0+cpu", import_s=2.0)
CUDA_TORCH = TorchFacts(version="2.11.0", import_s=4.0, cuda="12.8", devices=("H100",), nccl="2.27")
GPU = GpuFacts(index=0, name="H100", memory=80 * GIB, used=GIB)
FOLDER = FolderFacts(use="logs", path="/logs", free=100 * GIB, free_inodes=10**6, sync_s=0.01)
NODE = NodeFacts(
    workers=2, python="3.11.7", elastane="0.1.0", torch=CPU_TORCH, kernel="6.1",
    missing_calls=(), gpus=(), gpu_error="", shared_memory=8 * GIB,
    descriptors=10**6, soft_descriptors=65536, processes_left=10**5, cpus=8.0, host_cpus=8,
    memory=64 * GIB, host="n1", host_addresses=("10.0.0.5",), own_addresses=("10.0.0.5",),
    interface="eth0", clock_is_synchronized=True, folders=(FOLDER,), endpoint=None,
)  # fmt: skip
ENDPOINT = EndpointFacts(endpoint="n0:29400", addresses=("10.0.0.4",), outcome="connected")


def found(**changes):
    """Return the findings that are not good, as (subject, level), and all their texts."""
    bad = [one for one in judge(replace(NODE, **changes)) if one.level is not Level.GOOD]
    assert all(one.why and one.next_step for one in bad)
    texts = " ".join(f"{one.found} {one.why} {one.next_step}" for one in bad)
    return [(one.subject, one.level.value) for one in bad], texts


def test_a_fit_node_has_good_findings_alone():
    assert found() == ([], "")
    assert found(torch=CUDA_TORCH, gpus=(GPU,)) == ([], "")
    subjects = [one.subject for one in judge(NODE)]
    assert len(subjects) == len(set(subjects)) == 10


def test_the_name_of_the_host_is_not_used_where_gloo_has_a_card():
    assert found(host_addresses=("127.0.1.1",), gloo_card="eth1") == ([], "")


@pytest.mark.parametrize(
    ("changes", "subject", "level", "says"),
    [
        ({"missing_calls": ("pidfd_open",)}, "system", "fault", "pidfd_open"),
        ({"torch": TorchFacts(error="No module named 'torch'")}, "torch", "fault", "No module"),
        ({"torch": TorchFacts(version="2.3.1")}, "torch", "fault", "torch>=2.4"),
        ({"torch": TorchFacts(version="2.13.0", has_distributed=False)}, "torch", "fault", "USE"),
        ({"torch": TorchFacts(version="2.9.1")}, "torch", "warning", "2.11 and 2.13"),
        ({"torch": TorchFacts(version="2.13.0", import_s=70)}, "torch", "warning", "local disk"),
        ({"gpu_error": "no answer within 30 s"}, "GPUs", "fault", "no answer"),
        ({"gpus": (GPU,)}, "GPUs", "fault", "without CUDA"),
        ({"gpus": (GPU,), "torch": replace(CUDA_TORCH, devices=())}, "GPUs", "fault", "0 of 1"),
        ({"gpus": (GPU, GPU), "torch": CUDA_TORCH}, "GPUs", "warning", "1 of 2"),
        (
            {"gpus": (replace(GPU, uncorrected=3),), "torch": CUDA_TORCH},
            "GPU 0", "fault", "3 uncorrected",
        ),
        (
            {"gpus": (replace(GPU, used=20 * GIB),), "torch": CUDA_TORCH},
            "GPU 0", "warning", "20 GiB of 80 GiB",
        ),
        ({"shared_memory": 64 << 20}, "shared memory", "warning", "64 MiB"),
        ({"shared_memory_error": "Read-only"}, "shared memory", "warning", "remount,rw"),
        ({"shared_memory": None}, "shared memory", "warning", "none"),
        ({"memory": GIB}, "memory", "warning", "1.0 GiB"),
        ({"soft_descriptors": 1024}, "open files", "warning", "ulimit -n 65536"),
        ({"processes_left": 100}, "processes", "warning", "100 more"),
        ({"cpus": 1.5}, "CPUs", "warning", "1.5 of 8"),
        ({"host_addresses": ()}, "host name", "warning", "does not resolve"),
        ({"host_addresses": ("127.0.1.1",)}, "host name", "warning", "IFNAME=eth0"),
        (
            {"gloo_card": "eth9", "gloo_error": "there is no network card eth9"},
            "gloo", "fault", "export GLOO_SOCKET_IFNAME=eth0",
        ),
        ({"clock_is_synchronized": False}, "clock", "warning", "synchronized"),
        ({"endpoint": replace(ENDPOINT, outcome="timeout")}, "rendezvous", "fault", "nc -vz n0"),
        (
            {"endpoint": EndpointFacts(endpoint="x:1", outcome="host 'x' does not resolve here")},
            "rendezvous", "fault", "does not resolve",
        ),
        ({"folders": (replace(FOLDER, error="Permission denied"),)}, "logs", "fault", "denied"),
        ({"folders": (replace(FOLDER, free=1 << 20),)}, "logs", "fault", "1.0 MiB"),
        ({"folders": (replace(FOLDER, free_inodes=5),)}, "logs", "fault", "5 files more"),
        ({"folders": (replace(FOLDER, free_inodes=0),)}, "logs", "fault", "0 files more"),
        ({"folders": (replace(FOLDER, locks=False),)}, "logs", "fault", "locks"),
        ({"folders": (replace(FOLDER, free=GIB),)}, "logs", "warning", "1.0 GiB"),
        ({"folders": (replace(FOLDER, sync_s=2.0),)}, "logs", "warning", "2.0 s"),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_its_remedy(changes, subject, level, says):
    bad, texts = found(**changes)
    assert bad == [(subject, level)]
    assert says in texts


@pytest.mark.parametrize(
    "changes",
    [
        {"clock_is_synchronized": None},
        {"processes_left": None},
        {"own_addresses": (), "host_addresses": ("127.0.0.1",)},  # a machine without a network
        {"endpoint": ENDPOINT},
        {"endpoint": replace(ENDPOINT, outcome="refused")},
        {"endpoint": replace(ENDPOINT, outcome="refused", is_here=True)},
        {"folders": (replace(FOLDER, free_inodes=None),)},
    ],
)
def test_unknown_or_later_facts_are_not_findings(changes):
    assert found(**changes) == ([], "")


def test_a_host_without_an_interface_gets_the_advice_to_name_its_address():
    _, texts = found(host_addresses=("127.0.1.1",), interface="")
    assert "give n1 its address in /etc/hosts" in texts
