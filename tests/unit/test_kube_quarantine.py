"""Nodes on which pods of a job fail are avoided by the pods that are made next."""

from kube_cluster import Cluster, spec_of


def changed(**template):
    spec = spec_of()
    spec["replicaSpecs"]["Worker"]["template"]["spec"] |= template
    return spec


def affinity(cluster, name):
    return cluster.by_name(name).manifest["spec"].get("affinity", {}).get("nodeAffinity", {})


def fail_on(cluster, name, code, times):
    node = ""
    for _ in range(times):
        pod = cluster.by_name(name)
        node = pod.node
        cluster.exit(pod, code)
        cluster.settle()
    return node


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def test_a_node_where_pods_failed_often_is_avoided():
    cluster = Cluster(spec=spec_of(2, nodeQuarantine={"failures": 2}))
    cluster.settle()
    node = fail_on(cluster, "j-worker-1", 137, 1)
    assert affinity(cluster, "j-worker-1") == {}
    fail_on(cluster, "j-worker-1", 137, 1)
    (term,) = affinity(cluster, "j-worker-1")[REQUIRED]["nodeSelectorTerms"]
    assert term == {
        "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [node]}]
    }
    assert "NodeQuarantined" in [one.reason for one in cluster.events]


def test_an_eviction_says_nothing_about_a_node():
    cluster = Cluster(spec=spec_of(2, nodeQuarantine={"failures": 1}))
    cluster.settle()
    cluster.exit(cluster.by_name("j-worker-1"), 137, "Evicted")
    cluster.settle()
    assert affinity(cluster, "j-worker-1") == {}


def test_each_of_the_users_alternatives_avoids_the_node_as_well():
    terms = [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}, {"matchFields": [1]}]
    given = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}, "podAffinity": {"x": 1}}
    spec = changed(affinity=given) | {"nodeQuarantine": {"failures": 1}}
    cluster = Cluster(spec=spec)
    cluster.settle()
    fail_on(cluster, "j-worker-1", 137, 1)
    first, second = affinity(cluster, "j-worker-1")[REQUIRED]["nodeSelectorTerms"]
    assert (first["matchExpressions"], len(first["matchFields"])) == (
        terms[0]["matchExpressions"],
        1,
    )
    assert second["matchFields"][0] == 1
    assert len(second["matchFields"]) == 2
    assert cluster.by_name("j-worker-1").manifest["spec"]["affinity"]["podAffinity"] == {"x": 1}


def test_a_node_that_an_agent_calls_unfit_is_avoided_where_there_is_another():
    cluster = Cluster(spec=spec_of(2))
    cluster.settle()
    node = fail_on(cluster, "j-worker-1", 69, 1)
    (wish,) = affinity(cluster, "j-worker-1")[PREFERRED]
    assert wish["preference"]["matchFields"][0]["values"] == [node]
    assert REQUIRED not in affinity(cluster, "j-worker-1")
    assert "NodeUnfit" in [one.reason for one in cluster.events]
