"""An ElasticJob that a HorizontalPodAutoscaler of the real controller manager scales."""

import json

from elastic_jobs import workers
from jobs import until
from metrics_api import MetricsApi

AT_ONCE = {"stabilizationWindowSeconds": 0}


def autoscaler(api, most):
    """Half of what each pod asks for is to be used."""
    target = {"type": "Utilization", "averageUtilization": 50}
    up = {**AT_ONCE, "policies": [{"type": "Pods", "value": 9, "periodSeconds": 1}]}
    down = {**AT_ONCE, "policies": [{"type": "Percent", "value": 100, "periodSeconds": 1}]}
    return {
        "apiVersion": api,
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "train"},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "elastic.pytorch.org/v1alpha1",
                "kind": "ElasticJob",
                "name": "train",
            },
            "minReplicas": 1,
            "maxReplicas": most,
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
            "behavior": {"scaleUp": up, "scaleDown": down},
        },
    }


def test_an_autoscaler_finds_the_pods_of_a_job_and_scales_it_within_its_bounds(
    cluster, operator, make_job, control_plane
):
    cluster.add("a")
    job = make_job()
    container = job.container(resources={"requests": {"cpu": "100m"}})
    job.apply(replicas=1, low=1, high=3, container=container)
    job.wait_step(world=1)
    before = workers(job)
    api = control_plane.newest("autoscaling", "v2", "v2beta2")
    with MetricsApi(control_plane, job.space) as metrics:
        metrics.cpu = "200m"
        job.kubectl("apply", "-f", "-", given=json.dumps(autoscaler(api, most=5)))
        job.wait_step(world=3)
        # It asks for more than maxReplicas, which an Event says.
        until(lambda: "ReplicasOutOfRange" in job.reasons(), "it is held")
        assert len(job.pods()) == 3
        metrics.cpu = "1m"
        job.wait_step(world=1)
        job.wait_pods("one is left", lambda pods: len(pods) == 1)
    assert before.items() <= workers(job).items()
