"""A fault plan for a cluster that changes while the plan reads it."""

import os
import signal
import subprocess
from types import SimpleNamespace
from unittest import mock

from elastane.testing import FaultPlan, LocalCluster
from elastane.testing.cluster import ClusterWorld, LocalNode
from elastane.testing.plans import Fault


def test_a_worker_is_killed_even_if_its_world_was_replaced_meanwhile():
    worker = subprocess.Popen(["sleep", "600"])
    try:
        looks = iter([(worker.pid,)])
        node = SimpleNamespace(name="a", is_alive=True, workers=lambda: next(looks, ()))
        recorded = []
        cluster = SimpleNamespace(
            nodes=[node], events=lambda kind: [], record_fault=lambda *fault: recorded.append(fault)
        )
        (told,) = FaultPlan((Fault(0.0, "kill-worker", 0.0),)).run(cluster)
        assert worker.wait(10) == -9
    finally:
        worker.kill()
        worker.wait()
    assert told.endswith(f"kill-worker {worker.pid} of a")
    assert recorded == [("kill-worker", "a", f"kill-worker {worker.pid} of a")]


def test_a_worker_is_killed_even_if_the_next_world_is_settled_just_after_it_was_named(tmp_path):
    worker = subprocess.Popen(["sleep", "600"])
    try:
        cluster = LocalCluster(["script.py"], folder=tmp_path)
        worlds = iter([ClusterWorld(1, 0, ("a",), {"a": (worker.pid,)})])
        cluster.world = lambda: next(worlds, ClusterWorld(2, 0, ("a",), {}))
        assert LocalNode("a", worker, tmp_path / "log", cluster).kill_worker() == worker.pid
        assert worker.wait(60) == -9
    finally:
        worker.kill()
        worker.wait()


def test_one_number_chooses_among_all_workers_of_all_nodes():
    pids = {"a": (1, 2), "b": (3, 4)}
    nodes = [
        SimpleNamespace(name=name, is_alive=True, workers=lambda own=own: own)
        for name, own in pids.items()
    ]
    harmed = []
    job = SimpleNamespace(
        nodes=nodes,
        events=lambda kind: [],
        record_fault=lambda kind, node, text: harmed.append(text),
    )
    plan = FaultPlan(tuple(Fault(0.0, "kill-worker", pick) for pick in (0.1, 0.4, 0.6, 0.9)))
    with mock.patch("os.kill"):
        plan.run(job)
    assert harmed == [
        "kill-worker 1 of a", "kill-worker 2 of a", "kill-worker 3 of b", "kill-worker 4 of b",
    ]  # fmt: skip


def test_a_slow_worker_is_stopped_and_continued_in_turns_and_runs_at_the_end():
    worker = subprocess.Popen(["sleep", "600"])
    try:
        with mock.patch("os.kill", wraps=os.kill) as sent:
            node = SimpleNamespace(name="a", is_alive=True, workers=lambda: (worker.pid,))
            job = SimpleNamespace(
                nodes=[node], events=lambda kind: [], record_fault=lambda *fault: None
            )
            (told,) = FaultPlan((Fault(0.0, "slow-worker"),)).run(job)
        numbers = [call.args[1] for call in sent.call_args_list]
        assert numbers[::2] == [signal.SIGSTOP] * (len(numbers) // 2)
        assert numbers[1::2] == [signal.SIGCONT] * (len(numbers) // 2) and len(numbers) > 2
        assert told.endswith(f"slow-worker {worker.pid} of a for 2 s")
    finally:
        worker.kill()
        worker.wait()


def test_a_node_that_is_taken_away_stays_away_without_a_time_to_come_back():
    gone = []
    nodes = [
        SimpleNamespace(
            name=name,
            is_alive=True,
            kill=lambda name=name: gone.append(name),
            kill_agent=None,
            stop=None,
        )
        for name in "ab"
    ]
    job = SimpleNamespace(nodes=nodes, events=lambda kind: [], record_fault=lambda *fault: None)
    plan = FaultPlan((Fault(0.0, "kill-node", 0.9),), back_s=None)
    (told,) = plan.run(job)
    assert gone == ["b"] and told.endswith("kill-node b")


def test_a_node_that_comes_back_when_a_fault_is_due_is_its_target():
    def node(name):
        one = SimpleNamespace(name=name, is_alive=True, kill_agent=None)
        one.kill = one.stop = lambda: setattr(one, "is_alive", False)
        return one

    nodes = [node("a"), node("b")]

    def start(name):
        nodes.append(node(name))
        return nodes[-1]

    job = SimpleNamespace(
        nodes=nodes, events=lambda kind: [], record_fault=lambda *fault: None, start=start
    )
    # The return and the second fault are due by the next look.
    plan = FaultPlan((Fault(0.0, "kill-node"), Fault(0.01, "stop-node")), back_s=0.005)
    told = plan.run(job)
    assert [text.split(": ")[1] for text in told] == [
        "kill-node a", "a comes back", "stop-node b", "b comes back",
    ]  # fmt: skip
