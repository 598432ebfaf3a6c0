"""Pod groups of an ElasticJob on a real API server, and jobs of which another controller cares.

The definition of the group is Volcano's in its names and one field; no scheduler of it is here, and
no node either: what is tested is the operator. The pods name a scheduler that does not exist.
"""

import json

from jobs import until

GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/{}/podgroups"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = "podgroups.scheduling.volcano.sh"


def definition():
    spec = {"type": "object", "properties": {"minMember": {"type": "integer", "minimum": 0}}}
    schema = {"type": "object", "properties": {"spec": spec}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": "scheduling.volcano.sh",
            "scope": "Namespaced",
            "names": {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup"},
            "versions": [
                {
                    "name": "v1beta1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def test_a_group_is_made_once_its_api_is_installed_and_follows_the_job(operator, make_job):
    job, other = make_job(), make_job("elsewhere")
    plane = job.plane
    other.apply(managedBy="kueue.x-k8s.io/multikueue")
    job.apply(replicas=3, low=2, high=4, schedulingPolicy={"podGroup": "Volcano"})
    told = job.wait_condition("Running", "False", "install scheduling.volcano.sh/v1beta1")
    assert told["reason"] == "PodGroupUnavailable"
    assert not job.pods()

    def groups():
        return plane.ask("GET", GROUPS.format(job.space))["items"]

    def edit(**spec):
        job.kubectl("patch", "ej/train", "--type=merge", "-p", json.dumps({"spec": spec}))

    plane.ask("POST", DEFINITIONS, definition())
    try:
        pods = job.wait_pods("its pods", lambda pods: len(pods) == 3)
        (group,) = groups()
        assert group["metadata"]["ownerReferences"][0]["uid"] == job.get()["metadata"]["uid"]
        assert group["spec"] == {"minMember": 2}
        for pod in pods.values():
            assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "train"
            assert pod["spec"]["schedulerName"] == "volcano"
        edit(minReplicas=3)
        until(lambda: groups()[0]["spec"] == {"minMember": 3}, "the new minimum")
        edit(suspend=True)
        until(lambda: not job.pods() and not groups(), "no pod and no group")
        edit(suspend=False)
        job.wait_pods("its pods", lambda pods: len(pods) == 3)
        assert groups()[0]["spec"] == {"minMember": 3}
    finally:
        plane.ask("DELETE", f"{DEFINITIONS}/{NAME}")
    job.wait_condition("Degraded", words="PodGroupUnavailable")
    assert len(job.pods()) == 3
    assert "status" not in other.get() and not other.pods()
