"""The culprit for which the other workers of an unmodified script wait, and its activity."""

from __future__ import annotations

import os
import random
import re
from collections import Counter, defaultdict
from statistics import median

import pytest
from culprit_jobs import CLASSES, ENDED, FLOOR_S, KINDS, CulpritJob

from elastane.observe.needs import needs_of
from elastane.observe.report import read_report
from elastane.observe.story import story_of
from elastane.observe.view import JobView, after_event

SOAK_FAULTS = int(os.environ.get("SOAK_FAULTS", "600"))
SOAK_SEED = int(os.environ.get("SOAK_SEED", "7"))
SOAK_IN_PLACE = int(os.environ.get("SOAK_IN_PLACE", "300"))
IN_PLACE = ("loop", "sleep", "lock", "loader", "disk", "stop", "large", "small")


def test_the_culprit_is_named_with_what_it_does_instead(tmp_path):
    """One job: a wait that may end by itself is only reported, and an endless one is ended."""
    job = CulpritJob(tmp_path)
    with job.cluster:
        job.start()
        first = job.steps()
        found, _ = job.fault("loop", 0)
        assert (found.data["class"], found.data["ranks"]) == ("busy", "0"), found.reason
        assert found.reason.startswith("rank 0 on node a has not entered all_reduce #")
        assert " (reduce.py:" in found.reason and ", loop" in found.reason
        assert not found.data["certain"]
        after = {rank: pid for rank, (pid, _) in job.steps().items()}
        assert after == {rank: pid for rank, (pid, _) in first.items()}, "no worker was ended"
        assert not job.cluster.events("restart")
        found = job.stop_worker(1)
        assert (found.data["class"], found.data["ranks"]) == ("stopped", "1"), found.reason
        assert "is stopped by a signal" in job.cluster.events("restart")[-1].data["cause"]
        found, _ = job.fault("other", 2)
        assert (found.data["class"], found.data["ranks"]) == ("other-collective", "2"), found.reason
        assert "rank 2 called broadcast (waits_for_a_culprit.py:" in found.reason
        assert "ranks 0-1 called all_reduce (reduce.py:" in found.reason
        found, _ = job.fault("large", 1)
        assert (found.data["class"], found.data["ranks"]) == ("other-shape", "1"), found.reason
        assert "rank 1 called all_reduce of 4,000 bytes (waits_for_a_culprit.py:" in found.reason
        assert "ranks 0, 2 called all_reduce of 28 bytes (reduce.py:" in found.reason
        job.cluster.wait_event("restart", count=3)
        assert job.cluster.events("restart")[-1].data["cause_rank"] == 1


def test_a_worker_that_lives_on_after_an_error_is_named_with_it_and_ended(tmp_path):
    """Its thread would keep its process alive for an hour, and the others wait for it."""
    job = CulpritJob(tmp_path, workers=1, nodes="ab")
    with job.cluster:
        job.start()
        view = JobView()
        found, _ = job.begin_fault("lingers", 1)
        assert (found.data["class"], found.data["ranks"]) == ("raised", "1"), found.reason
        assert re.match(r"rank 1 on node [ab] raised RuntimeError: planted; its", found.reason)
        for event in job.cluster.events():
            view = after_event(view, event)
        needs = [(need.severity, need.text) for need in needs_of(view)]
        stall = view.incidents.beside("stall")
        assert stall.title == f"Rank 1 on node {found.node} raised RuntimeError: planted"
        pid = found.data["culprit_pid"]
        assert ("next", f"To end rank 1 now: kill -9 {pid} on {found.node}") in needs
        restart = job.cluster.wait_event("restart")
        assert restart.data["cause_rank"] == 1
        assert "RuntimeError: planted" in restart.data["cause"]
        assert "after its error [worker-lives-on]" in restart.data["cause"]
        job.wait_steps(20)
        assert len(job.cluster.events("culprit")) == 1, "it is known for whom the others wait"


def test_the_culprit_of_several_nodes_is_named_and_ended_where_the_wait_never_ends(tmp_path):
    """Each agent only sees its own worker; the coordinator compares them."""
    job = CulpritJob(tmp_path, workers=1, nodes="ab")
    with job.cluster:
        job.start()
        found, _ = job.fault("sleep", 1)
        assert (found.data["class"], found.data["ranks"]) == ("sleeps", "1"), found.reason
        # The nodes' ranks follow from which of them joined first.
        assert re.match(r"rank 1 on node [ab] has not entered all_reduce #", found.reason)
        assert "; rank 0 waits in it;" in found.reason
        assert not job.cluster.events("restart")
        found, _ = job.fault("stop", 0)
        assert (found.data["class"], found.data["ranks"]) == ("stopped", "0"), found.reason
        assert "is stopped by a signal" in job.cluster.events("restart")[-1].data["cause"]


def test_all_views_name_one_process_as_the_cause_whose_calls_differ(tmp_path):
    """Rank 3 on the one node sends too much, so that gloo ends a worker of the other node too."""
    job = CulpritJob(
        tmp_path, workers=2, nodes="ab", max_restarts=0,
        report_file=str(tmp_path / "report.json"),
    )  # fmt: skip
    with job.cluster:
        job.start()
        pid = job.steps()[3][0]
        node = next(node for node in job.cluster.nodes if pid in node.workers())
        found, _ = job.begin_fault("large", 3)
        job.cluster.wait(lambda: not any(one.is_alive for one in job.cluster.nodes), "the end")
        ended = job.cluster.wait_event("job-ended").data
        story = story_of("job", "", job.cluster.events())
        [incident] = play(job).incidents.listed
        boxes = [" ".join(one.output.replace("║", "").split()) for one in job.cluster.nodes]
    where = node.name, 3, 1, pid
    names = "node", "rank", "local_rank", "pid"
    assert found.data.get("culprit_node") == node.name, found.reason
    assert found.data["ranks"] == "3", found.reason
    assert tuple(ended[f"cause_{name}"] for name in names) == where, ended
    root = read_report(str(tmp_path / "report.json")).root_cause
    assert tuple(getattr(root, name) for name in names) == where, root
    assert tuple(getattr(incident, name) for name in names) == where, incident
    assert (story.attempts[-1].root_node, story.attempts[-1].root_rank) == where[:2]
    for box in boxes:
        assert f"rank 3 (local rank 1, pid {pid})" in box.partition("where ")[2], box
        assert box.partition("where ")[2].startswith(f"node {node.name}, round "), box


def play(job):
    """Return the view after all events of a job."""
    view = JobView()
    for event in job.cluster.events():
        view = after_event(view, event)
    return view


def test_programs_that_differ_in_place_are_one_incident_with_one_cause(tmp_path):
    """The group finds it, the survivors meet, find that they differ, and all workers restart."""
    job = CulpritJob(tmp_path, workers=2, nodes="ab", in_place=True)
    with job.cluster:
        job.start()
        pid = job.steps()[1][0]
        node = next(node for node in job.cluster.nodes if pid in node.workers())
        job.told.write_text("other 1")
        job.cluster.wait_event("restart")
        job.told.unlink()
        job.wait_steps(20)
        [one] = play(job).incidents.listed
    assert (one.kind, one.rank, one.state) == ("stall", 1, "recovered"), one
    assert "rank 1 called broadcast (waits_for_a_culprit.py:" in one.cause
    assert any("do not run the same program" in line for line in one.evidence), one.evidence
    restart = job.cluster.events("restart")[-1].data
    cause = restart["cause"]
    found = tuple(restart[f"cause_{name}"] for name in ("node", "rank", "local_rank", "pid"))
    assert found == (node.name, 1, 1, pid), restart
    assert (one.node, one.pid) == (node.name, pid), one
    assert cause.startswith(f"rank 1 on node {node.name}: collective #"), cause
    assert not job.cluster.events("stall"), "no wait corrects that, so none is needed"


@pytest.mark.soak
def test_without_the_ring_nothing_is_recorded_and_no_rank_is_named(tmp_path):
    job = CulpritJob(tmp_path, no_collective_ring=True)
    with job.cluster:
        job.start()
        job.told.write_text("sleep 1")
        job.wait_still()
        assert not job.cluster.events("culprit")
        job.told.unlink()
        job.wait_steps()
        assert job.cluster.nodes[0].is_alive


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_faults_name_the_right_rank_and_kind(tmp_path):
    """At least 95 of 100 are right; prints the table. SOAK_FAULTS and SOAK_SEED set the faults."""
    choose = random.Random(SOAK_SEED)
    right, all_of, late = Counter(), Counter(), defaultdict(list)
    conf = {"hang_floor": FLOOR_S, "crash_loop": 0, "same_crash": 0}
    job = CulpritJob(tmp_path, workers=4, rdzv_conf=conf)
    with job.cluster:
        job.start()
        for number in range(SOAK_FAULTS):
            fault, rank = [*KINDS][number % len(KINDS)], choose.randrange(4)
            job.wait_steps(choose.randrange(1, 40))
            found, took_s = job.fault(fault, rank)
            all_of[fault] += 1
            fits = named(found) == (KINDS[fault], str(rank))
            right[fault] += fits
            late[fault].append(took_s)
            if not fits:
                print(fault, rank, found.reason)
    for fault in KINDS:
        took_s = f"{median(late[fault]):.1f} s in the median, {max(late[fault]):.1f} s at most"
        print(f"{fault:8} {right[fault]:4} of {all_of[fault]}, after {took_s}")
    assert sum(right.values()) >= 0.95 * SOAK_FAULTS, right
    assert len(job.cluster.events("restart")) == sum(all_of[fault] for fault in ENDED)


def named(found):
    """Return the class and the rank that an event about a culprit, or about an end, names."""
    if found.kind == "culprit":
        return found.data["class"], found.data["ranks"]
    return "", str(found.data.get("cause_rank"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_in_place_the_right_rank_and_kind_are_named_too(tmp_path):
    """Faults of each kind except another collective, which the group itself reports."""
    right, all_of = Counter(), Counter()
    for number in range(SOAK_IN_PLACE):
        fault = IN_PLACE[number % len(IN_PLACE)]
        folder = tmp_path / str(number)
        folder.mkdir()
        job = CulpritJob(folder, in_place=True, ranks_may_change=True, min_workers=2)
        with job.cluster:
            job.start()
            rank = random.Random(SOAK_SEED + number).randrange(3)
            found, _ = job.begin_fault(fault, rank)
        fits = (found.data["class"], found.data["ranks"]) == (CLASSES[fault], str(rank))
        right[fault] += fits
        all_of[fault] += 1
        if not fits:
            print(fault, rank, found.reason)
    for fault in IN_PLACE:
        print(f"{fault:8} {right[fault]:4} of {all_of[fault]}")
    assert sum(right.values()) >= 0.95 * SOAK_IN_PLACE, right
