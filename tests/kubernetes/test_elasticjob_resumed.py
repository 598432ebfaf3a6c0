"""A suspended job is resumed with fewer pods, of which none was in its last world."""

import json

from jobs import until


def test_resuming_with_fewer_pods_continues_with_the_next_step_at_once(cluster, operator, make_job):
    for name in ("a", "b"):
        cluster.add(name)
    job = make_job()
    job.steps = 100_000
    container = job.container()
    container["args"].append("/job/checkpoints")
    # As Kueue leaves a job that it has not admitted.
    job.apply(replicas=3, low=1, high=3, container=container, suspend=True)
    job.wait_condition("Suspended")
    assert not job.pods()

    def edit(suspend, replicas):
        worker = {"Worker": {"replicas": replicas}}
        spec = {"spec": {"suspend": suspend, "replicaSpecs": worker}}
        job.kubectl("patch", "ej/train", "--type=merge", "-p", json.dumps(spec))

    edit(False, 3)
    job.wait_step(world=3)
    edit(True, 3)
    until(lambda: not job.pods(), "the pods are gone")
    until(lambda: job.get()["status"]["worldSize"] == 0, "the world is gone")
    said = json.loads(job.kubectl("get", "cm", "train-directive", "-o", "json"))["data"]
    before = job.seen()
    edit(False, 1)
    # 60 s at most: unless the record says that all nodes were released it takes 140 s.
    until(lambda: len(job.seen()) > len(before), "steps of the resumed job", 60)
    until(lambda: job.get()["status"].get("step", 0) > 0, "its step in the status")
    # The pods wrote the only checkpoint while they drained: no step is lost, and none done twice.
    last, after = max(each.step for each in before), job.seen()[len(before) :]
    assert min(each.step for each in after) == last + 1
    assert len(said["dead"].split()) == 3
    status = job.get()["status"]
    assert (status["worldSize"], status["failures"]) == (1, 0)
