"""A SIGKILL by the out-of-memory killer is recognized by counters."""

import signal

import pytest

from elastane.agent import failure_reports
from elastane.agent.failure_reports import OomCounters, kill_evidence, read_memory, size

KILL = -signal.SIGKILL


@pytest.mark.parametrize("code", [0, 1, 137, -signal.SIGTERM, -signal.SIGSEGV])
def test_memory_evidence_is_only_given_for_a_sigkill(code):
    assert kill_evidence(OomCounters(0, 0), OomCounters(1, 1), 1, code) == ""


def test_a_kill_in_the_cgroup_names_its_limit_and_the_workers_peak():
    text = kill_evidence(OomCounters(2, 5), OomCounters(3, 6, limit_bytes=8 << 30), 6 << 30, KILL)
    assert text == (
        "out of memory: the kernel killed a process of this cgroup (limit 8 GiB); "
        "its memory had peaked at 6 GiB"
    )


def test_a_kill_elsewhere_on_the_host_is_probable_evidence():
    assert kill_evidence(OomCounters(2, 5), OomCounters(2, 6), 0, KILL).startswith(
        "out of memory, probably"
    )
    assert kill_evidence(OomCounters(None, 5), OomCounters(None, 6), 0, KILL).startswith(
        "out of memory, pr"
    )


def test_unchanged_counters_mean_a_kill_from_outside():
    text = kill_evidence(OomCounters(2, 5), OomCounters(2, 5), 0, KILL)
    assert text == "from outside: neither the agent nor the kernel's out-of-memory killer"


def test_without_counters_nothing_is_claimed():
    text = kill_evidence(OomCounters(), OomCounters(), 0, KILL)
    assert text == "from outside, or out of memory: the kernel's counters cannot be read here"


def test_the_counters_of_this_machine_can_be_read():
    found = read_memory()
    assert found.host_kills is not None and found.host_kills >= 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 B"), (1536, "1.5 KiB"), (5 << 40, "5 TiB"), (5 << 50, "5.12e+03 TiB")],
)
def test_sizes_are_readable(count, text):
    assert size(count) == text


V1 = "12:cpu,cpuacct:/job\n7:memory:/job/a\n1:name=systemd:/\n"
V2 = "0::/job/a\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Create the /proc and cgroup files of a machine with this cgroup."""

    def make(ours, files):
        monkeypatch.setattr(failure_reports, "_CGROUPS", tmp_path)
        monkeypatch.setattr(failure_reports, "_OURS", tmp_path / "ours")
        if ours is not None:
            (tmp_path / "ours").write_text(ours)
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read_memory()

    return make


@pytest.mark.parametrize(
    ("ours", "folder", "events", "limit"),
    [
        (V1, "memory/job/a", "memory.oom_control", "memory.limit_in_bytes"),
        (V2, "job/a", "memory.events", "memory.max"),
        # In a container the kernel names the host's path, and the cgroup is the root that is seen.
        (V1, "memory", "memory.oom_control", "memory.limit_in_bytes"),
        (V2, ".", "memory.events", "memory.max"),
        # Both are mounted, and the memory is one's own.
        (V1 + V2, "memory/job/a", "memory.oom_control", "memory.limit_in_bytes"),
        (V1.replace("7:memory:", "7:pids:") + V2, "job/a", "memory.events", "memory.max"),
    ],
)
def test_a_cgroup_is_read_by_either_version_inside_a_container_and_out(
    machine, ours, folder, events, limit
):
    files = {f"{folder}/{events}": "low 0\noom 9\noom_kill 3\n", f"{folder}/{limit}": "4096\n"}
    found = machine(ours, files)
    assert (found.cgroup_kills, found.limit_bytes) == (3, 4096)


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", ""])
def test_a_cgroup_without_a_limit_has_none(machine, text):
    found = machine(V2, {"job/a/memory.events": "oom_kill 0\n", "job/a/memory.max": text})
    assert (found.cgroup_kills, found.limit_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("ours", "files"),
    [
        (None, {}),
        (V2, {}),
        ("1:name=systemd:/\n", {"memory.events": "oom_kill 3\n"}),
        # An old kernel counts no kills.
        (V1, {"memory/job/a/memory.oom_control": "under_oom 0\n"}),
    ],
)
def test_a_cgroup_without_a_kill_counter_claims_nothing(machine, ours, files):
    found = machine(ours, files)
    assert (found.cgroup_kills, found.limit_bytes) == (None, 0)
