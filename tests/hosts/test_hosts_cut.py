"""Hosts that are cut off, both ways, one way, or from the store: at most one side trains."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from host_jobs import HostJob, job_on, let_pass, wait_world
from jobs import newest, until

from elastane.observe.deposed import decided
from elastane.observe.story import story_of
from elastane.protocol.log_events import EventKind

# Silence is 3 s, a lease 2 s, the wait for the last world's agents 2 s; the rest is room for a
# busy machine.
BOUND_S = 30.0
FAULTS = [
    "cut_off",
    pytest.param("mute", marks=pytest.mark.soak),
    pytest.param("deafen", marks=pytest.mark.soak),
]


def begin(job: HostJob, names: str = "abc") -> None:
    """Start the agents, with the coordinator in the first one."""
    job.start(names[0])
    job.wait_event(EventKind.COORDINATOR_STARTED)
    job.start_all(names[1:])
    wait_world(job, names)
    assert job.coordinator().name == names[0]


def goes_on(job: HostJob, nodes: str, since_s: float, fence: tuple[int, int] = (1, 0)) -> None:
    """Assert that only these nodes train, in another world than `fence`, within the bound."""
    first = wait_world(job, nodes, fence)
    assert first.time_s - since_s < BOUND_S
    assert first.restarts == 0, "a departure uses no restart"
    others = [s for s in job.seen() if s.node not in nodes and s.time_s > first.time_s]
    assert not others, "the other side steps on"


def comes_back(job: HostJob, nodes: str) -> None:
    """Heal the network; assert that all train again, with the cut-off nodes as arrivals."""
    now = newest(job.seen())[-1]
    job.lan.heal()
    since_s = time.time()
    first = wait_world(job, nodes, (now.round, now.attempt))
    assert first.time_s - since_s < BOUND_S
    assert (first.round, first.attempt) > (now.round, now.attempt)


def nobody_steps(job: HostJob, for_s: float) -> None:
    """Assert that no step is made, except for one whose commit was already on the wire."""
    before = {(s.rank, s.step) for s in job.seen()}
    let_pass(for_s)
    after = {(s.rank, s.step) for s in job.seen()} - before
    assert len({step for _, step in after}) <= 1, sorted(after)


@pytest.mark.parametrize(
    "fault", ["mute", *(pytest.param(f, marks=pytest.mark.soak) for f in ("cut_off", "deafen"))]
)
@pytest.mark.soak
def test_the_others_continue_without_a_cut_off_member_and_admit_it_again(
    tmp_path: Path, fault: str
) -> None:
    with job_on(tmp_path, "abc") as job:
        begin(job)
        getattr(job.lan, fault)("b")
        since_s = time.time()
        goes_on(job, "ac", since_s)
        departed = job.wait_event(EventKind.NODE_DEPARTED, "b")
        assert departed.time_s - since_s < BOUND_S
        away = [e for e in job.events(EventKind.COORDINATOR_AWAY) if e.node == "b"]
        assert away, "b knows that it is alone"
        comes_back(job, "abc")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_host_of_the_endpoint_is_cut_off_and_no_side_trains_until_it_is_healed(
    tmp_path: Path, fault: str
) -> None:
    with job_on(tmp_path, "abc") as job:
        begin(job)
        getattr(job.lan, fault)("a")
        nobody_steps(job, 5.0)
        assert all(agent.is_alive for agent in job.agents)
        assert {e.node for e in job.events(EventKind.NODE_DEPARTED)} == {"b", "c"}
        comes_back(job, "abc")


@pytest.mark.soak
def test_the_host_of_the_endpoint_continues_alone_if_one_node_is_enough(tmp_path: Path) -> None:
    with job_on(tmp_path, "abc", nnodes="1:3") as job:
        begin(job)
        job.lan.cut_off("a")
        goes_on(job, "a", time.time())
        let_pass(2.0)
        assert {s.node for s in newest(job.seen())} == {"a"}
        comes_back(job, "abc")


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["cut_off", "mute", "deafen"])
def test_the_coordinator_is_cut_off_from_all_and_etcd_and_the_majority_elects_another(
    tmp_path: Path, fault: str
) -> None:
    with job_on(tmp_path, "abc", backend="etcd") as job:
        begin(job)
        getattr(job.lan, fault)("a")
        goes_on(job, "bc", time.time())
        assert job.coordinator().name in "bc"
        lost = [e for e in job.events(EventKind.AUTHORITY_LOST) if e.host == "a"]
        assert lost, "the old coordinator knows that it may not decide"
        story = story_of(job.name, "", decided(job.events()))
        assert {line.split()[1] for line in story.departures} == {"a:"}, "the side that trains"
        comes_back(job, "abc")


@pytest.mark.soak
def test_a_member_cut_off_from_the_store_alone_continues_and_follows_the_coordinator(
    tmp_path: Path,
) -> None:
    with job_on(tmp_path, "abc", backend="etcd", options=("--max-restarts", "1")) as job:
        begin(job)
        job.lan.cut_off("b", "s")
        job.wait_step(world=3, count=len(newest(job.seen())) // 3 + 75)
        assert {(s.round, s.attempt) for s in job.seen()} == {(1, 0)}, "nobody restarted"
        victim = next(s for s in newest(job.seen()) if s.node == "b")
        job.lan["b"].ask("signal", pid=victim.pid, number=int(signal.SIGKILL))
        again = wait_world(job, "abc", (1, 0))
        assert (again.round, again.attempt, again.restarts) == (1, 1, 1), "decisions reach it"


@pytest.mark.soak
def test_a_coordinator_cut_off_from_the_store_alone_is_replaced_by_another_node(
    tmp_path: Path,
) -> None:
    with job_on(tmp_path, "abc", backend="etcd") as job:
        begin(job)
        job.lan.cut_off("a", "s")
        goes_on(job, "bc", time.time())
        assert job.coordinator().name in "bc"
        comes_back(job, "abc")


@pytest.mark.soak
def test_a_coordinator_that_lost_the_store_for_a_moment_finds_its_successor_and_nothing_restarts(
    tmp_path: Path,
) -> None:
    with job_on(tmp_path, "abc", backend="etcd", conf="reregister=20") as job:
        begin(job)
        job.lan.cut_off("a", "s")
        for name in "bc":
            job.wait_event(EventKind.NODE_REGISTERED_AGAIN, name)
        job.lan.heal()
        job.wait_event(EventKind.ROUND_RESUMED)
        job.wait_step(world=3, count=len(newest(job.seen())) // 3 + 50)
        assert {(s.round, s.attempt) for s in job.seen()} == {(1, 0)}


@pytest.mark.soak
def test_an_unreachable_store_stops_no_training_and_is_found_again(tmp_path: Path) -> None:
    with job_on(tmp_path, "ab", backend="etcd", nnodes="2") as job:
        begin(job, "ab")
        job.lan.cut_off("s")
        job.wait_event(EventKind.AUTHORITY_LOST)
        job.wait_step(world=2, count=len(newest(job.seen())) // 2 + 100)
        job.lan.heal()
        # Either of the two leads then.
        found = {EventKind.AUTHORITY_REGAINED, EventKind.ROUND_RESUMED}
        until(lambda: {e.kind for e in job.events()} & found, "there is a coordinator again")
        job.wait_step(world=2, count=len(newest(job.seen())) // 2 + 50)
        assert {(s.round, s.attempt) for s in job.seen()} == {(1, 0)}


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["etcd", pytest.param("file", marks=pytest.mark.soak)])
def test_a_coordinator_that_reaches_no_agent_loses_its_leadership(
    tmp_path: Path, backend: str
) -> None:
    with job_on(tmp_path, "abc", backend=backend) as job:
        begin(job)
        job.lan.cut_off("a", "b", "c")
        goes_on(job, "bc", time.time())
        comes_back(job, "abc")
