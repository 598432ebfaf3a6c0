"""ElasticJobs on a real control plane: applied by kubectl, with real training in their pods."""

import json
import signal

import pytest
from elastic_jobs import STOCK, leadership_of, steps_of, workers
from jobs import newest, until


def test_a_job_grows_and_shrinks_by_kubectl_and_is_there_when_its_operator_is_not(
    cluster, operator, make_job
):
    for name in ("a", "b", "c"):
        cluster.add(name)
    job = make_job()
    job.apply(replicas=2, low=1, high=3)
    job.wait_step(world=2)
    before = workers(job)
    operator.kill()
    job.kubectl("scale", "ej/train", "--replicas=3")
    at = newest(job.seen())[-1].step
    job.wait("no job notices", lambda seen: newest(seen)[-1].step > at + 20)
    assert len(job.pods()) == 2
    operator.start()
    job.wait_step(world=3)
    # No worker was restarted for it: the first two continued in their processes.
    assert before.items() <= workers(job).items()
    # Scaled above maxReplicas, the job keeps maxReplicas, and an Event says so.
    job.kubectl("scale", "ej/train", "--replicas=9")
    job.wait_condition("Running")
    operator.stop()
    job.kubectl("scale", "ej/train", "--replicas=1")
    operator.start()
    job.wait_step(world=1)
    job.wait_pods("one pod is left", lambda pods: len(pods) == 1)
    assert before["train-worker-0"] == workers(job)["train-worker-0"]
    again = {step: fences for step, fences in steps_of(job.seen()).items() if len(fences) > 1}
    assert not again, "a drained pod leaves between two steps"


def test_a_coordinator_whose_pod_is_killed_is_followed_before_its_lease_has_run_out(
    cluster, operator, make_job
):
    cluster.add("a")
    job = make_job()
    job.apply(replicas=2, low=1, high=2)
    before = job.wait_step(world=2)
    path, holder = leadership_of(job)
    (other,) = set(workers(job)) - {holder}
    # The survivor stands still until the operator has acted: it would end the lease itself.
    for pod in (other, holder):
        cluster.tell(job.space, pod, "signal", number=signal.SIGSTOP)
    # From now on the lease does not run out within the test.
    forever = {"spec": {"leaseDurationSeconds": 86_400}}
    job.plane.ask("PATCH", path, forever, kind="merge-patch+json")
    cluster.tell(job.space, holder, "signal", number=signal.SIGKILL)
    ended = f"pod {holder} is dead: the lease"
    until(lambda: ended in operator.report(), "the operator has ended the lease")
    cluster.tell(job.space, other, "signal", number=signal.SIGCONT)
    job.wait_step(world=2, fence=(before.round, before.attempt))


def test_mistakes_of_a_manifest_are_reported_at_once_and_for_good(cluster, operator, make_job):
    cluster.add("a")
    image = make_job("image")
    image.apply(replicas=1, low=1, high=1, container=image.container(image="nobody/has:this"))
    name = make_job("name")
    # YAML 1.1 reads the key N as false: what the API server refuses each time.
    name.apply(replicas=1, low=1, high=1, container=name.container(env=[{"name": False}]))
    ranges = make_job("ranges")
    ranges.apply(replicas=1, low=3, high=2)
    other = make_job("other")
    with pytest.raises(AssertionError, match="replicas"):
        other.apply(replicas=-1)
    told = ranges.wait_condition("Failed", words="minReplicas")
    assert "3" in told["message"] and "2" in told["message"]
    name.wait_condition("Failed", words="env")
    until(lambda: "nobody/has:this" in json.dumps(image.get()["status"]), "the image is named")
    assert not name.pods() and not ranges.pods()


@pytest.mark.soak
def test_a_stock_torchrun_grows_and_shrinks(cluster, operator, make_job):
    for name in ("a", "b", "c"):
        cluster.add(name)
    job = make_job(image="torchrun", script=STOCK)
    job.apply(replicas=2, low=1, high=3)
    job.wait("two train", lambda seen: _last(seen) == 2)
    job.kubectl("scale", "ej/train", "--replicas=3")
    job.wait("three train", lambda seen: _last(seen) == 3)
    job.kubectl("scale", "ej/train", "--replicas=2")
    job.wait("two train", lambda seen: _last(seen) == 2)


def _last(seen):
    return seen[-1].world if seen else 0
