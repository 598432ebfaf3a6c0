"""Branches of the rules that the other tests do not reach."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_driver import Driver, job_spec

from elastane.agent.rules import FULL_TEXTS_MAX, SHORT_TEXT_CHARS, Contact, Group
from elastane.coordinator.rules import invariants, machine
from elastane.errors import WireError
from elastane.protocol.limits import FAILURES_MAX, Timing
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Drained, Failed, Heartbeat, Succeeded
from elastane.protocol.model import (
    Assignment,
    Failure,
    Fence,
    JobRecord,
    Outcome,
    World,
    WorldMember,
)
from elastane.protocol.wire import NONCE_BYTES, ServerHandshake, SessionKeys, codec_for_agent

SPEC = job_spec(1, 4)
OWN = """ConfigurationError: a group of some: not possible with --in-place [in-place-refused]
  expected: DistributedDataParallel
  next: start the script without --in-place"""
STACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n'


def world(fence, *ids, size=1):
    return World(
        fence=Fence(*fence),
        members=tuple(
            WorldMember(node_id=i, incarnation="1", local_world_size=size, role="r") for i in ids
        ),
    )


def given(world, **changed):
    found, base = [], 0
    total = sum(member.local_world_size for member in world.members)
    for rank, member in enumerate(world.members):
        one = Assignment(
            fence=world.fence, node_rank=rank, nodes=len(world.members), rank_base=base,
            world_size=total, role_rank_base=base, role_world_size=total, master_addr="h",
            master_port=1, agent_store=True, restarts_used=0, max_restarts=0, reason="",
        )  # fmt: skip
        found.append(one)
        base += member.local_world_size
    found[-1] = msgspec.structs.replace(found[-1], **changed)
    return found


# What must always hold


@pytest.mark.parametrize(
    ("previous", "now", "says"),
    [
        (None, world((1, 0), "a"), ""),
        (world((1, 0), "a"), world((1, 1), "a"), ""),
        (world((1, 0), "a", "b", "c"), world((2, 0), "a", "c", "d"), ""),
        (world((2, 0), "a"), world((1, 9), "a"), "was committed after"),
        (world((2, 0), "a"), world((2, 0), "a"), "was committed after"),
        (world((2, 0), "a"), world((2, 1), "b"), "two memberships in round 2"),
        (world((1, 0), "a", "b"), world((2, 0), "b", "a"), "were put in the order"),
    ],
)
def test_a_broken_succession_is_named(previous, now, says):
    found = invariants.broken_succession(previous, now)
    assert says in found and bool(found) == bool(says)


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (world((1, 0), "a", "b"), ""),
        (world((1, 0)), "has 0 nodes, of 1 to 4"),
        (world((1, 0), *"abcde"), "has 5 nodes"),
        (world((1, 0), "a", "a"), "holds a node twice"),
    ],
)
def test_a_broken_size_is_named(now, says):
    found = invariants.broken_size(SPEC, None, now)
    assert says in found and bool(found) == bool(says)


@pytest.mark.parametrize(("holders", "is_broken"), [({"e"}, False), (set(), True)])
def test_a_world_of_state_holders_may_exceed_the_maximum(holders, is_broken):
    found = invariants.broken_size(SPEC, world((1, 0), *"abcd"), world((2, 0), *"abcde"), holders)
    assert bool(found) == is_broken


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, ""),
        ({"node_rank": 0}, "node rank 1 was given"),
        ({"rank_base": 3}, "node rank 1 was given"),
        ({"role_rank_base": 0}, "node rank 1 was given"),
        ({"world_size": 5}, "disagree on world size or fence"),
        ({"fence": Fence(1, 1)}, "disagree on world size or fence"),
    ],
)
def test_broken_ranks_are_named(changed, says):
    two = world((1, 0), "a", "b", size=2)
    found = invariants.broken_ranks(two, given(two, **changed))
    assert says in found and bool(found) == bool(says)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (None, {}, ""),
        ({"outcome": Outcome(ok=True, reason="x")}, {}, "was changed"),
        ({"restarts_used": 2}, {"restarts_used": 1}, "went from 2 to 1"),
        ({}, {"restarts_used": 1}, ""),
        ({"world": world((1, 0), "a")}, {}, "the world was forgotten"),
        ({"world": world((2, 0), "a")}, {"world": world((1, 0), "a")}, "was committed after"),
        ({"world": world((1, 0), "a")}, {"world": world((1, 0), "a")}, ""),
    ],
)
def test_a_record_that_goes_back_is_named(before, after, says):
    previous = JobRecord(spec=SPEC, **before) if before is not None else None
    found = invariants.broken_record(previous, JobRecord(spec=SPEC, **after))
    assert says in found and bool(found) == bool(says)


# The rendezvous


def test_a_report_of_too_many_failures_is_no_message():
    one = Failure(local_rank=0, rank=0, pid=1, exit_code=1)
    with pytest.raises(ValueError, match="at most"):
        Failed(fence=Fence(1, 0), failures=(one,) * (FAILURES_MAX + 1))


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (-9, "find who sent SIGKILL: a scheduler, a person, or the kernel"),
        (-15, "find who sent SIGTERM: a scheduler, a person"),
        (137, "which a shell reports as exit code 137"),
        (-11, "read the stacks"),
        (1, "mend the script"),
    ],
)
def test_the_next_step_fits_the_way_a_worker_ended(exit_code, words):
    one = Driver(job_spec(1, 1, restarts=0))
    one.join("a")
    one.fails("a", "x", exit_code)
    one.stops("a")
    one.passes(1.0, alive="a")
    assert words in one.persisted[-1].outcome.next_step


LOADER = "RuntimeError: DataLoader worker (pid 7) is killed by signal:"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"exit_code": -9, "evidence": "out of memory: the kernel killed it"}, "more memory"),
        ({"message": f"{STACK}MemoryError"}, "more memory"),
        ({"message": f"{STACK}elastane.errors.{OWN}"}, "start the script without --in-place"),
        ({"message": OWN}, "start the script without --in-place"),
        ({"message": f"{OWN}\n\n{STACK}ValueError: x"}, "mend the script"),
        ({"message": f"{STACK}torch.OutOfMemoryError: CUDA out of memory."}, "of its GPU"),
        ({"message": f"{STACK}OSError: [Errno 28] No space left on device"}, "df -h"),
        ({"message": f"{STACK}RuntimeError: basic_ios::clear: iostream error"}, "df -h"),
        (
            {
                "message": f"{STACK}RuntimeError: [enforce fail at inline_container.cc:672] ."
                " unexpected pos 8512 vs 8406"
            },
            "df -h",
        ),
        ({"message": f"{STACK}{LOADER} Killed."}, "fewer num_workers"),
        ({"message": f"{STACK}OSError: [Errno 24] Too many open files"}, "ulimit -n 65536"),
        ({"message": f"{STACK}RuntimeError: received 0 items of ancdata"}, "ulimit -n 65536"),
        ({"message": f"{STACK}ModuleNotFoundError: No module named 'torch'"}, "install torch in"),
        ({"message": f"{STACK}SystemExit: /py: No module named a.b"}, "install a.b in"),
        ({"message": "/py: No module named a", "output": True}, "install a in"),
        (
            {"message": f"{STACK}ModuleNotFoundError: No module named 'a.b'; 'a' is not a package"},
            "mend the script",
        ),
        (
            {
                "message": "not started: no /py [worker-start]\n  where: folder /\n"
                "  next: run it by hand"
            },
            "run it by hand",
        ),
        ({"message": f"{STACK}{LOADER} Bus error. It is possible that"}, "/dev/shm"),
        ({"message": "No space left on device", "exit_code": -9, "output": True}, "SIGKILL"),
        (
            {
                "message": "Fatal Python error: Aborted: Received data size doesn't match expected"
                " size",
                "exit_code": -6,
            },
            "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        ),
    ],
)
def test_the_next_step_fits_what_a_worker_said(found, words):
    one = Driver(job_spec(1, 1, restarts=0))
    one.join("a")
    fence = one.assigned["a"].fence
    failure = Failure(**{"local_rank": 0, "rank": 0, "pid": 1, "exit_code": 1, **found})
    one.says("a", Failed(fence=fence, failures=(failure,)))
    one.stops("a")
    one.passes(1.0, alive="a")
    assert words in one.persisted[-1].outcome.next_step
    [ended] = [event for event in one.events if event.kind is EventKind.JOB_ENDED]
    assert words in ended.data["next_step"]


def test_the_steps_at_the_end_of_a_job_are_logged_though_their_count_is_not_due():
    one = Driver(job_spec(2, 2))
    one.join("a"), one.join("b")
    for node in "ab":
        fence = one.assigned[node].fence
        one.says(node, Heartbeat(fence=fence, progress=7))
    one.says("a", Succeeded(fence=fence, steps=9))
    one.says("b", Succeeded(fence=fence, steps=10))
    kinds = [(event.kind, event.data.get("steps")) for event in one.events[-2:]]
    assert kinds == [(EventKind.PROGRESS, 9), (EventKind.JOB_ENDED, None)]


def test_unchanged_authority_is_not_reported_again(pair):
    pair.authority(True)
    pair.authority(False)
    pair.authority(False)
    kinds = [event.kind for event in pair.events]
    assert EventKind.AUTHORITY_REGAINED not in kinds
    assert kinds.count(EventKind.AUTHORITY_LOST) == 1


def test_rules_that_contradict_one_another_are_a_bug_that_says_so(pair, monkeypatch):
    monkeypatch.setitem(machine.RULES, machine.MembershipPhase.RUNNING, lambda state: True)
    with pytest.raises(AssertionError, match="contradict one another in phase"):
        pair.leaves("a")


def test_messages_of_an_old_fence_change_nothing(pair):
    before = pair.machine.report()
    for message in (
        Succeeded(Fence(0, 9)),
        Drained(fence=Fence(0, 9), drain=0),
        Failed(fence=Fence(0, 9), failures=()),
    ):
        pair.says("a", message)
    after = pair.machine.report()
    assert [n.state for n in after.nodes] == [n.state for n in before.nodes] == ["running"] * 2


def test_a_record_without_a_world_begins_as_if_there_were_none():
    one = Driver(job_spec(1, 1), record=JobRecord(spec=job_spec(1, 1)))
    one.join("a")
    assert one.fence == {"round": 1, "attempt": 0}


def test_status_shows_nodes_that_are_away_or_leaving(elastic):
    elastic.leaves("b")
    assert {n.node_id: n.state for n in elastic.machine.report().nodes}["b"] == "leaving"
    elastic.breaks("a", clean=False)
    assert {n.node_id: n.state for n in elastic.machine.report().nodes}["a"] == "away"


def test_the_master_is_reached_by_what_other_hosts_see():
    one = Driver(job_spec(2, 2))
    one.join("a", host="127.0.0.1")
    one.join("b", host="10.0.0.7")
    assert one.assigned["a"].master_addr == "10.0.0.99", "where b reached the coordinator"
    alone = Driver(job_spec(2, 2))
    alone.join("a", host="127.0.0.1")
    alone.join("b", host="127.0.0.1")
    assert alone.assigned["b"].master_addr == "127.0.0.1"
    named = Driver(job_spec(1, 1))
    named.join("a", local_addr="192.0.2.9")
    assert named.assigned["a"].master_addr == "192.0.2.9"


# The agent


def test_an_unexpected_answer_proves_nothing_new():
    contact = Contact(5.0, Timing())
    contact.session_started(6.0)
    contact.heartbeat_answered(authority=True)
    assert contact.authority_s == 6.0, "as of the session's begin, and no later"


def test_many_failures_of_one_node_are_kept_with_less_text():
    group = Group(given(world((1, 0), "a"))[0], Fence(1, 0))
    for rank in range(FAILURES_MAX + 5):
        failure = Failure(local_rank=rank, rank=rank, pid=1, exit_code=1, message="x" * 999)
        group.add_failure(failure, 10.0)
    kept = group.aged_failures(11.0)
    assert len(kept) == FAILURES_MAX
    sizes = [len(failure.message) for failure in kept]
    assert sizes[:FULL_TEXTS_MAX] == [999] * FULL_TEXTS_MAX
    assert set(sizes[FULL_TEXTS_MAX:]) == {SHORT_TEXT_CHARS}


# The wire


def test_a_codec_that_found_a_fault_is_ready():
    codec = codec_for_agent(SessionKeys(b"k" * 32, b"l" * 32))
    codec.feed(b"\\xff" * 64)
    with pytest.raises(WireError):
        codec.next()
    assert codec.ready


def test_the_coordinators_side_sends_nothing_to_a_silent_peer():
    assert ServerHandshake("job", b"k" * 32, bytes(NONCE_BYTES)).start() == b""
