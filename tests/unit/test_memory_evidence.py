"""A SIGKILL for want of memory is told from others, by counters and not by guessing."""

import signal

import pytest

from elastane.agent.memory import Memory, kill_evidence, read_memory, size

KILL = -signal.SIGKILL


@pytest.mark.parametrize("code", [0, 1, 137, -signal.SIGTERM, -signal.SIGSEGV])
def test_only_a_sigkill_is_judged(code):
    assert kill_evidence(Memory(0, 0), Memory(1, 1), 1, code) == ""


def test_a_kill_in_the_cgroup_names_its_limit_and_the_workers_peak():
    text = kill_evidence(Memory(2, 5), Memory(3, 6, limit_bytes=8 << 30), 6 << 30, KILL)
    assert text == (
        "out of memory: the kernel killed a process of this cgroup (limit 8 GiB); "
        "its memory had peaked at 6 GiB"
    )


def test_a_kill_elsewhere_on_the_host_is_probable_evidence():
    assert kill_evidence(Memory(2, 5), Memory(2, 6), 0, KILL).startswith("out of memory, probably")
    assert kill_evidence(Memory(None, 5), Memory(None, 6), 0, KILL).startswith("out of memory, pr")


def test_counters_that_stood_still_say_that_it_came_from_outside():
    text = kill_evidence(Memory(2, 5), Memory(2, 5), 0, KILL)
    assert text == "from outside: neither the agent nor the kernel's out-of-memory killer"


def test_without_counters_nothing_is_claimed():
    text = kill_evidence(Memory(), Memory(), 0, KILL)
    assert text == "from outside, or out of memory: the kernel's counters cannot be read here"


def test_the_counters_of_this_machine_can_be_read():
    found = read_memory()
    assert found.host_kills is not None and found.host_kills >= 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 B"), (1536, "1.5 KiB"), (5 << 40, "5 TiB"), (5 << 50, "5.12e+03 TiB")],
)
def test_sizes_read_well(count, text):
    assert size(count) == text
