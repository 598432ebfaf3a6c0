"""A worker that hangs without dying is found by its progress, shows its stack, and is replaced."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter

import pytest
from culprit_jobs import KINDS
from test_recovery_in_place import SCRIPT, InPlace, starts

from elastane.protocol.hangs import HANG_STALL_S

FLOOR_S = 3.0


# One node: its zygote imports torch once for all workers.
ONE_NODE = {"nnodes": "1", "nproc_per_node": 3, "min_workers": 2}


def told_to_hang(job, how, rank=1):
    """Let the worker of a rank hang in some way; return its pid and those of the others."""
    [node] = job.cluster.nodes
    living: set[int] = set()
    job.cluster.wait(lambda: living.update(node.workers()) or living, "its agent names its workers")
    by_rank = {lines[-1]["rank"]: pid for pid, lines in job.said().items() if pid in living}
    hung = by_rank.pop(rank)
    (job.folder / "said" / f"{hung}.new").write_text(how)
    (job.folder / "said" / f"{hung}.new").rename(job.folder / "said" / f"{hung}.hang")
    return hung, {*by_rank.values()}


def test_a_hanging_worker_is_killed_with_its_stack_and_replaced(tmp_path):
    """A loop, a call that holds the interpreter's lock, a data loader, and a stopped process."""
    job = InPlace(tmp_path, rdzv_conf={"hang_floor": FLOOR_S}, **ONE_NODE)
    hangs = (
        ("loop", "in the body of a step", "in hang", {"busy"}),
        # A held lock is seen by a thread that is two seconds late. On a busy host it may be late
        # by less when the limit of three seconds is over.
        ("lock", "in the body of a step", "in hang", {"lock-held", "sleeps"}),
        ("loader", "waiting for its data loader", "in __getitem__", {"data-loader"}),
    )
    with job.cluster:
        [node] = starts(job, "a", world=3)
        for count, (how, at, frame, kinds) in enumerate(hangs, 1):
            hung, others = told_to_hang(job, how)
            job.cluster.wait_event("replacement", count=count)
            after = job.wait_steps(5, 3)
            assert others < set(after) and hung not in after
            exits = [e for e in job.cluster.events("worker-exited") if e.data.get("exit_code")]
            assert len(exits) == count and exits[-1].data["pid"] == hung
            message = exits[-1].data["message"]
            assert "it hung: no progress for" in message, message
            assert at in message and frame in message, message
            assert "it hung" in job.cluster.events("replacement")[-1].data["cause"]
            found = job.cluster.events("culprit")[-1]
            assert found.data["class"] in kinds and found.data["ranks"] == "1", found.reason
        victim = node.kill_worker(2, number=signal.SIGSTOP)
        job.cluster.wait_event("replacement", count=len(hangs) + 1)
        assert victim not in job.wait_steps(5, 3)
        assert "stopped by a signal" in job.cluster.events("replacement")[-1].data["cause"]
        assert job.cluster.events("culprit")[-1].data["class"] == "stopped"
        job.ends_exact()


def test_a_worker_whose_abort_never_returns_is_killed_and_replaced(tmp_path):
    """The abort of a driver or of NCCL may not return. The worker's agent notices it."""
    job = InPlace(tmp_path, **ONE_NODE)
    with job.cluster:
        [node] = starts(job, "a", world=3)
        hung, others = told_to_hang(job, "abort")
        told = job.folder / "said" / f"{hung}.hang"
        job.cluster.wait(lambda: not told.exists(), "its abort is planted")
        dead = node.kill_worker(0)
        assert dead in others
        job.cluster.wait_event("replacement", count=2)
        after = job.wait_steps(5, 3)
        assert others - {dead} < set(after) and hung not in after
        causes = [event.data["cause"] for event in job.cluster.events("replacement")]
        assert "in an abort of its process group for" in causes[1], causes
        job.ends_exact()


def test_workers_in_a_deadlock_continue_in_another_world(tmp_path):
    job = InPlace(tmp_path, rdzv_conf={"hang_floor": FLOOR_S}, **{**ONE_NODE, "nproc_per_node": 2})
    with job.cluster:
        starts(job, "a", world=2)
        before = set(job.said())
        for rank in (0, 1):
            told_to_hang(job, "receive", rank)
        assert set(job.wait_steps(5, 2)) == before
        assert not job.cluster.events("restart", "replacement")
        job.cluster.wait_event("round-settled", "wait for one another")
        job.ends_exact()


def test_other_calls_of_a_rank_are_named_before_a_stall_however_long_steps_took(tmp_path):
    """After a pause of 1.6 s, calls are compared after 16 s. A stall ends its world after 10 s."""
    job = InPlace(tmp_path, **ONE_NODE)
    with job.cluster:
        starts(job, "a", world=3)
        job.wait_steps(5, 3)
        told_to_hang(job, "pause", 0)
        job.wait_steps(10, 3)
        pid, _ = told_to_hang(job, "other", 2)
        job.cluster.wait_event("incident")
        job.wait_steps(5, 3)
        [found] = job.cluster.events("culprit")
        assert found.data["class"] == "other-collective" and found.data["ranks"] == "2"
        assert (found.data["culprit_pid"], found.data["culprit_node"]) == (pid, "a")
        [incident] = job.cluster.events("incident")
        assert incident.reason == found.reason
        job.ends_exact()


def test_other_calls_of_a_rank_in_the_first_steps_of_a_world_are_named(tmp_path):
    """The first moves of a world are not judged, since they wait for compilers and downloads."""
    job = InPlace(tmp_path, **ONE_NODE)
    (job.folder / "said" / "rank-1.hang").write_text("other")
    with job.cluster:
        starts(job, "a", world=3)
        incident = job.cluster.wait_event("incident")
        [found] = job.cluster.events("culprit")
        assert found.data["class"] == "other-collective" and found.data["ranks"] == "1"
        assert incident.reason == found.reason
        job.ends_exact()


def test_a_stall_of_an_arrival_is_reported_by_rank_and_ended_by_another_world(tmp_path):
    """Each step ends with an evaluation; the arrival broadcasts buffers, and the others do not."""
    options = {"script_path": SCRIPT.with_name("ddp_in_place.py"), "env": {"PLANT": "sync"}}
    options |= {"nnodes": "1:2", "nproc_per_node": 2}
    job = InPlace(tmp_path, **options)
    with job.cluster:
        starts(job, "a", world=2)
        before = set(job.said())
        job.cluster.start("c", nproc_per_node=1)
        assert before < set(job.wait_steps(5, 3))
        job.cluster.wait_event("incident")
        [told] = job.cluster.events("stall")
        assert re.search(r"ranks 0-1 in all_reduce of a backward \(ddp_in_place.py:\d+, main\),"
                         r" rank 2 in _sync_buffers", told.reason), told.reason  # fmt: skip
        [incident] = job.cluster.events("incident")
        assert incident.reason.startswith("all workers wait for one another: ranks 0-1 in")
        assert not job.cluster.events("replacement")
        (job.folder / "said" / "enough").touch()
        nodes = job.cluster.nodes
        job.cluster.wait(lambda: not any(node.is_alive for node in nodes), "all agents end")
        ends = [lines[-1] for lines in job.said().values()]
        assert len({(line["step"], line["total"]) for line in ends}) == 1, ends


def test_a_worker_in_a_debugger_is_not_judged(tmp_path):
    keyboard = tmp_path / "keyboard"
    os.mkfifo(keyboard)
    conf, env = {"hang_floor": FLOOR_S}, {"HANG_STDIN": str(keyboard)}
    job = InPlace(tmp_path, rdzv_conf=conf, env=env, **{**ONE_NODE, "nproc_per_node": 2})
    with job.cluster:
        starts(job, "a", world=2)
        before = set(job.said())
        held, _ = told_to_hang(job, "pdb")
        job.cluster.wait(lambda: not (job.folder / "said" / f"{held}.hang").exists(), "it halts")
        with keyboard.open("w") as keys:
            job.cluster.wait(lambda: waited_s(job) > HANG_STALL_S + FLOOR_S, "a long wait")
            keys.write("continue\n")
        assert set(job.wait_steps(5, 2)) == before
        assert not job.cluster.events("incident")
        job.ends_exact()


def waited_s(job):
    """Return for how long no worker has made a step."""
    return time.monotonic() - max(lines[-1]["at_s"] for lines in job.said().values())


SOAK_FAULTS = int(os.environ.get("SOAK_FAULTS", "600"))
SOAK_SEED = int(os.environ.get("SOAK_SEED", "7"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_random_faults_of_steps_in_place_name_the_right_rank_and_kind(tmp_path):
    """At least 95 of 100 are right; prints the table. SOAK_FAULTS and SOAK_SEED set the faults."""
    os.mkfifo(tmp_path / "disk")
    # A held lock is seen by a thread that is two seconds late, on a busy host some more.
    conf = {"hang_floor": 2 * FLOOR_S, "crash_loop": 0, "same_crash": 0}
    job = InPlace(tmp_path, rdzv_conf=conf, env={"HANG_DISK": str(tmp_path / "disk")}, **ONE_NODE)
    choose, right, all_of = random.Random(SOAK_SEED), Counter(), Counter()
    with job.cluster:
        starts(job, "a", world=3)
        for number in range(SOAK_FAULTS):
            fault, rank = [*KINDS][number % len(KINDS)], choose.randrange(3)
            job.wait_steps(choose.randrange(1, 30), 3)
            known = len(job.cluster.events())
            pid, _ = told_to_hang(job, fault, rank)
            job.cluster.wait(lambda n=known: ended(job.cluster.events()[n:]), fault)
            job.wait_steps(5, 3)
            found = named(job.cluster.events()[known:])
            right[fault] += found == (KINDS[fault], pid)
            all_of[fault] += 1
            if found != (KINDS[fault], pid):
                print(fault, rank, found, [one.reason for one in job.cluster.events()[known:]])
    for fault in KINDS:
        print(f"{fault:8} {right[fault]:4} of {all_of[fault]}")
    assert sum(right.values()) >= 0.95 * SOAK_FAULTS, right


def ended(events):
    """Return the events that end a world by a fault."""
    return [event for event in events if event.kind == "incident"]


def named(events):
    """Return the class and the process of the first culprit, or the process of the root cause."""
    for event in events:
        if event.kind == "culprit":
            return event.data["class"], event.data.get("culprit_pid")
    causes = [event for event in events if event.kind in ("replacement", "restart")]
    return "", causes[0].data.get("cause_pid") if causes else None
