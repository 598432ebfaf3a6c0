"""Jobs without progress whose pods all run: crash loops, and steps that do not rise."""

import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.reconcile.bounds import QUICK_S

STALLED_S = 600


def running(**more):
    cluster = Cluster(spec=spec_of(2, 2, 4, **more))
    cluster.settle()
    return cluster


def look(cluster, pass_s=1.0, **report):
    """Let time pass, the coordinator report this, and the operator decide."""
    cluster.now_s += pass_s
    if report:
        cluster.tell_who_is_in(**report)
    cluster.relist()
    return cluster.operate()[0]


def test_restarts_of_workers_in_their_pods_are_restarts():
    cluster = running()
    look(cluster, restarts=1, step=5)
    assert (cluster.status.restarts, cluster.status.failures) == (1, 0)
    cluster.exit(cluster.by_name("j-worker-1"), 137)
    look(cluster, restarts=19, step=900)
    status = cluster.status
    assert (status.restarts, status.worker_restarts, status.failures) == (20, 19, 1)
    look(cluster, restarts=0, step=901)
    assert cluster.status.restarts == 20, "it never goes back"


def test_nineteen_failures_without_a_step_are_one_event_and_a_condition():
    cluster = running()
    look(cluster, step=40)
    told = []
    for restarts in range(1, 20):
        told += look(cluster, 5.0, step=30, restarts=restarts, incident="n1: ValueError").events
    events = [one for one in told if one.reason == "CrashLooping"]
    assert len({one.message for one in events}) == 1
    assert [one.count for one in events] == list(range(3, 20))
    status = cluster.status
    assert (status.phase, status.restarts) == ("CrashLooping", 19)
    assert status.is_("Running"), "kubectl wait --for=condition=Running means pods"
    message = status.condition("CrashLooping").message
    assert message.startswith("19 failures in a row without a step above 40; the last: n1: Value")


def test_a_crash_loop_that_reaches_the_same_step_each_time_is_one():
    cluster = running()
    look(cluster, step=50)
    for restarts in range(1, 4):
        look(cluster, step=40, restarts=restarts)
        look(cluster, step=50, restarts=restarts)
    assert cluster.status.is_("CrashLooping")


def test_failures_between_which_the_step_rises_are_none():
    cluster = running()
    for restarts in range(1, 9):
        look(cluster, step=10 * restarts, restarts=restarts)
    assert not cluster.status.is_("CrashLooping")
    assert cluster.status.crashes.count == 1


@pytest.mark.parametrize("how", ["a step", "a quiet time"])
def test_a_crash_loop_ends_with(how):
    cluster = running(stalledSeconds=0)
    for restarts in range(1, 5):
        decision = look(cluster, step=7, restarts=restarts)
    assert cluster.status.is_("CrashLooping")
    if how == "a step":
        look(cluster, step=8, restarts=4)
    else:
        assert decision.again_in_s <= QUICK_S
        look(cluster, QUICK_S + 1, step=7, restarts=4)
    assert cluster.status.condition("CrashLooping").status == "False"
    assert cluster.status.phase == "Running"


def test_containers_that_the_kubelet_restarts_again_and_again_are_a_crash_loop():
    cluster = running(policy="OnFailure")
    for _ in range(3):
        cluster.exit(cluster.by_name("j-worker-1"), 1)
        look(cluster)
    assert cluster.status.phase == "CrashLooping"


def test_a_job_whose_step_does_not_rise_is_stalled_until_it_does():
    cluster = running()
    look(cluster, step=57)
    since = cluster.status.last_progress_time
    decision = look(cluster, STALLED_S - 2, step=57)
    assert not cluster.status.is_("Stalled") and decision.again_in_s <= 2
    look(cluster, 2, step=57)
    assert cluster.status.phase == "Stalled"
    message = cluster.status.condition("Stalled").message
    assert message == f"no step above 57 since {since}; spec.stalledSeconds is 600"
    version = cluster.job["metadata"]["resourceVersion"]
    look(cluster, 1000, step=57)
    assert cluster.job["metadata"]["resourceVersion"] == version, "it is said once"
    look(cluster, step=58)
    assert cluster.status.phase == "Running"


def test_how_long_is_a_field_and_zero_is_never():
    cluster = running(stalledSeconds=10)
    look(cluster, step=57)
    look(cluster, 11, step=57)
    assert cluster.status.is_("Stalled")
    cluster.edit(spec_of(2, 2, 4, stalledSeconds=0))
    look(cluster, 10_000, step=57)
    assert not cluster.status.is_("Stalled")


def test_a_script_that_reports_no_steps_is_never_stalled():
    cluster = running()
    look(cluster, step=0)
    look(cluster, 10_000, step=0)
    assert cluster.status.phase == "Running"


def test_the_time_without_enough_pods_does_not_count():
    cluster = running()
    look(cluster, step=57)
    pod = cluster.by_name("j-worker-1")
    cluster.ask(pod, 30)
    cluster.end_deleted()
    look(cluster, 5000, step=57)
    look(cluster, 5000, step=57)
    assert not cluster.status.is_("Stalled") and cluster.status.is_("Degraded")
    cluster.start(cluster.by_name("j-worker-1"), "n1")
    look(cluster, 1, step=57)
    look(cluster, STALLED_S - 2, step=57)
    assert not cluster.status.is_("Stalled")
    look(cluster, 2, step=57)
    assert cluster.status.is_("Stalled")


def test_the_time_of_a_suspension_does_not_count():
    cluster = running()
    look(cluster, step=57)
    cluster.edit(spec_of(2, 2, 4, suspend=True))
    cluster.settle()
    cluster.edit(spec_of(2, 2, 4))
    cluster.settle(pass_s=1.0)
    look(cluster, 1, step=57)
    assert not cluster.status.is_("Stalled")
