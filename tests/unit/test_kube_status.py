"""The status: reports, workers, conditions and their times; bounded, and written once."""

from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model.observed import JobReport, MemberReport


def running(replicas=2, least=1, most=4):
    """Return a job whose pods run."""
    cluster = Cluster(spec=spec_of(replicas, least, most))
    cluster.settle()
    return cluster


def decide(cluster):
    """Let the operator observe the cluster, decide and act."""
    cluster.relist()
    return cluster.operate()[0]


def report_of(cluster, **more):
    """Return the coordinator's report about the existing pods."""
    pods = sorted(cluster.pods.values(), key=lambda pod: pod.index)
    members = tuple(
        MemberReport(pod=pod.uid, state="joined", rank=rank) for rank, pod in enumerate(pods)
    )
    more = {"round": 3, "world_size": len(pods), "phase": "running"} | more
    return JobReport(at_s=cluster.now_s, members=members, **more)


def end(cluster, index, code):
    cluster.exit(cluster.by_name(f"j-worker-{index}"), code)


def test_the_report_is_in_the_status_and_what_it_said_last_stays():
    cluster = running(2)
    pod = cluster.by_name("j-worker-1")
    cluster.report = JobReport(
        at_s=cluster.now_s,
        round=3,
        world_size=8,
        step=120,
        steps_per_s=2.34567,
        incident="n1: SIGKILL of local rank 2",
        incident_at_s=cluster.now_s,
        members=(MemberReport(pod=pod.uid, state="joined", rank=1),),
    )
    decide(cluster)
    status = cluster.status
    said = (status.round, status.world_size, status.step, status.steps_per_second)
    assert said == (3, 8, 120, 2.35)
    assert status.last_incident.cause == "n1: SIGKILL of local rank 2"
    assert [worker.rank for worker in status.workers] == [None, 1]
    cluster.report = None
    decide(cluster)
    assert cluster.status.step == 120


def test_a_report_about_pods_that_are_all_gone_is_not_shown():
    """Otherwise a resumed job would show the world and step from before its suspension."""
    cluster = running(2)
    cluster.report = report_of(cluster, step=120)
    decide(cluster)
    assert (cluster.status.world_size, cluster.status.step) == (2, 120)
    cluster.report = JobReport(at_s=cluster.now_s, round=4, world_size=9, step=130)
    decide(cluster)
    said = (cluster.status.world_size, cluster.status.step)
    assert said == (2, 120), "a new coordinator knows no pod yet: what stands stays"
    cluster.report = report_of(cluster, step=120)
    cluster.edit(spec_of(2, suspend=True))
    decide(cluster)
    assert cluster.pods, "its pods are leaving, and count no more"
    decide(cluster)
    assert (cluster.status.world_size, cluster.status.step) == (0, 120)
    cluster.settle()
    assert (cluster.status.world_size, cluster.status.step) == (0, 120)
    cluster.edit(spec_of(2))
    decide(cluster), decide(cluster)
    status = cluster.status
    assert (status.replicas, status.world_size, status.step, status.round) == (2, 0, None, None)
    cluster.report = JobReport(at_s=cluster.now_s, round=3, world_size=2, step=120)
    decide(cluster)
    assert cluster.status.world_size == 0, "its coordinator knows none of the pods yet"
    cluster.report = report_of(cluster, step=100)
    decide(cluster)
    assert (cluster.status.world_size, cluster.status.step) == (2, 100)


def test_failing_workers_are_listed_first_and_the_list_is_bounded():
    cluster = running(100, 1, 100)
    end(cluster, 99, 137)
    decide(cluster)
    status = cluster.status
    assert len(status.workers) == 64
    assert status.workers_omitted == 36
    assert status.workers[-1].index == 99
    assert (status.workers[-1].reason, status.workers[-1].exit_code) == ("App", 137)


def test_a_thousand_pods_that_fail_at_once_give_a_bounded_number_of_events():
    cluster = running(200, 1, 200)
    for pod in cluster.pods.values():
        cluster.exit(pod, 137)
    decision = decide(cluster)
    assert len(decision.events) == 64
    assert cluster.status.failures == 200


def test_a_decision_that_changes_nothing_writes_nothing_whatever_the_time():
    cluster = running(3)
    version = cluster.job["metadata"]["resourceVersion"]
    for seconds in (1, 60, 86_400):
        cluster.now_s += seconds
        assert decide(cluster).actions == ()
    assert cluster.job["metadata"]["resourceVersion"] == version


def test_a_transition_has_its_time_and_an_edition():
    cluster = running(2, 2)
    before = cluster.status.condition("Running")
    cluster.now_s += 10
    cluster.edit(spec_of(2, 1))
    decide(cluster)
    edited = cluster.status.condition("Running")
    assert edited.last_transition_time == before.last_transition_time
    assert edited.last_update_time != before.last_update_time
    assert edited.observed_generation == cluster.status.observed_generation == 2
    cluster.now_s += 10
    cluster.edit(spec_of(2, 2))
    end(cluster, 1, 137)
    decide(cluster)
    changed = cluster.status.condition("Running")
    assert changed.status == "False"
    assert changed.last_transition_time != before.last_transition_time
    assert cluster.status.conditions[-1].type == cluster.status.phase
