"""Nodes of an ElasticJob are drained by kubectl, under a PodDisruptionBudget of the user's."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from elastic_jobs import ONE_GPU

BUDGET = {
    "kind": "PodDisruptionBudget",
    "metadata": {"name": "train"},
    "spec": {"minAvailable": 1, "selector": {"matchLabels": {"job-name": "train"}}},
}


def times_of(job, words):
    """Of each event whose kind or reason has these words: when it was, and of which node."""
    found = [event for event in job.all_events() if words in f"{event.kind}: {event.reason}"]
    return sorted((event.time_s, event.node) for event in found)


@pytest.mark.soak
def test_of_two_nodes_that_are_drained_at_once_a_budget_lets_one_pod_go_after_the_other(
    cluster, operator, make_job, control_plane
):
    for name in ("a", "b", "c"):
        cluster.add(name, capacity=ONE_GPU)
    job, api = make_job(), control_plane.newest("policy", "v1", "v1beta1")
    job.apply(replicas=2, low=1, high=2, container=job.container(resources={"limits": ONE_GPU}))
    job.kubectl("apply", "-f", "-", given=json.dumps({"apiVersion": api, **BUDGET}))
    job.wait_step(world=2)
    first = {pod["metadata"]["uid"] for pod in job.pods().values()}
    nodes = sorted({pod["spec"]["nodeName"] for pod in job.pods().values()})
    assert len(nodes) == 2

    def drain(node):
        options = ("--ignore-daemonsets", "--force", "--timeout=150s")
        return control_plane.kubectl("drain", node, *options, limit_s=200)

    # One node with one GPU is left: the second pod leaves once the first one's successor runs
    # there, and its own waits for a node.
    with ThreadPoolExecutor() as drains:
        said = list(drains.map(drain, nodes))
    assert all("evicted" in text for text in said)
    left = times_of(job, "agent-stopped: released: drained")
    began = times_of(job, "agent-started")
    assert [name for _, name in left] == [began[2][1], left[1][1]] and len(set(left)) == 2
    assert left[0] < began[2] < left[1], "one leaves, its successor comes, the other leaves"
    job.kubectl("uncordon", *nodes)
    job.wait_pods(
        "both were replaced",
        lambda pods: len(pods) == 2 and not first & {p["metadata"]["uid"] for p in pods.values()},
    )
    job.wait_step(world=2)
    status = job.get()["status"]
    assert (status["disruptions"], status["failures"]) == (2, 0), status
