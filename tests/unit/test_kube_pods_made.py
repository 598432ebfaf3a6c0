"""The created pods and objects: names, labels, injected arguments, Services, access."""

import copy

import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import (
    CreateObject,
    CreatePod,
    CreateToken,
    DeleteObject,
    PatchObject,
    Refusal,
)
from elastane.kubernetes.model.names import MADE_OF
from elastane.kubernetes.store.objects import token_of


def begun(spec=None):
    """Return a job that was seen for the first time, and the decision about it."""
    cluster = Cluster(spec=spec or spec_of())
    decision, _ = cluster.operate()
    return cluster, decision


def pod_of(spec, name="j-worker-0"):
    return begun(spec)[0].by_name(name).manifest


def worker_of(spec):
    containers = pod_of(spec)["spec"]["containers"]
    return next(one for one in containers if one["name"] == "elasticjob-worker")


def args_of(**more):
    return worker_of(spec_of(**more))["args"]


def variables_of(**more):
    return {one["name"]: one.get("value") for one in worker_of(spec_of(**more))["env"]}


def changed(**template):
    spec = spec_of()
    spec["replicaSpecs"]["Worker"]["template"]["spec"] |= template
    return spec


def test_names_and_labels_are_the_originals():
    cluster, decision = begun(spec_of(3))
    made = [action for action in decision.actions if isinstance(action, CreatePod)]
    assert [action.name for action in made] == ["j-worker-0", "j-worker-1", "j-worker-2"]
    assert made[1].manifest["metadata"]["labels"] == {
        "group-name": "elastic.pytorch.org",
        "job-name": "j",
        "replica-type": "worker",
        "replica-index": "1",
    }
    (owner,) = made[0].manifest["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("job00000-1", True)
    assert cluster.status.selector == "group-name=elastic.pytorch.org,job-name=j"


def test_the_users_labels_stay_and_do_not_win():
    spec = spec_of()
    meta = {"labels": {"app": "x", "job-name": "other"}, "annotations": {"a": "b"}, "name": "n"}
    spec["replicaSpecs"]["Worker"]["template"]["metadata"] = meta
    made = pod_of(spec)["metadata"]
    assert (made["labels"]["app"], made["labels"]["job-name"]) == ("x", "j")
    assert (made["annotations"]["a"], made["name"]) == ("b", "j-worker-0")


# What the user wrote, and the four arguments in the original's order.
INJECTED = [
    ({}, ["kubernetes", "ns", "j-job00000", "1:4"]),
    ({"launcher": "torchrun"}, ["c10d", "j-worker-0.j:29400", "j-job00000", "1:4"]),
    ({"rdzvEndpoint": "etcd:2379"}, ["etcd", "etcd:2379", "j-job00000", "1:4"]),
    (
        {"rdzvEndpoint": "etcd:2379", "rdzvBackend": "etcd-v2", "launcher": "torchrun"},
        ["etcd-v2", "etcd:2379", "j-job00000", "1:4"],
    ),
    ({"rdzvEndpoint": "j-worker-0:29400"}, ["c10d", "j-worker-0:29400", "j-job00000", "1:4"]),
    ({"rdzvEndpoint": "j-worker-0.j"}, ["c10d", "j-worker-0.j", "j-job00000", "1:4"]),
    ({"rdzvEndpoint": "ej-worker-0:1"}, ["etcd", "ej-worker-0:1", "j-job00000", "1:4"]),
    ({"rdzvBackend": "elastane"}, ["elastane", "j-worker-0.j:29400", "j-job00000", "1:4"]),
    ({"rdzvBackend": "file", "rdzvEndpoint": "/s"}, ["file", "/s", "j-job00000", "1:4"]),
]


@pytest.mark.parametrize(("more", "values"), INJECTED, ids=str)
def test_the_four_arguments_come_before_the_users(more, values):
    flags = ["--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--nnodes"]
    expected = [f"{flag}={value}" for flag, value in zip(flags, values, strict=True)]
    assert args_of(**more) == [*expected, "train.py"]


@pytest.mark.parametrize("word", ["--rdzv_id=mine", "--rdzv-id=mine", "--rdzv-id"])
def test_an_id_of_the_users_is_the_only_one_and_names_the_token(word):
    spec = spec_of()
    given = [word, *(["mine"] if word.endswith("id") else []), "train.py"]
    spec["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"] = given
    args = worker_of(spec)["args"]
    assert args[2] == "--nnodes=1:4"
    assert args[3:] == given
    tokens = [one for one in begun(spec)[1].actions if isinstance(one, CreateToken)]
    assert [one.name for one in tokens] == [token_of("mine")]


def test_a_job_created_again_has_another_rendezvous_id():
    """pytorch/elastic #151: under the same id in the same etcd the job is closed."""
    one, other = Cluster(spec=spec_of()), Cluster(spec=spec_of())
    other.job["metadata"]["uid"] = "job11111-1"
    other.relist()
    for cluster in (one, other):
        cluster.operate()
    ids = {
        cluster.by_name("j-worker-0").manifest["spec"]["containers"][0]["args"][2]
        for cluster in (one, other)
    }
    assert ids == {"--rdzv_id=j-job00000", "--rdzv_id=j-job11111"}


def test_spares_become_an_argument():
    assert args_of(spares=2)[4] == "--spares-per-node=2"


def test_a_stock_torchrun_gets_its_variables():
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert variables_of(launcher="torchrun")[name] == "1"
    assert variables_of(rdzvEndpoint="etcd:2379")[name] == "1"
    assert name not in variables_of()
    assert variables_of()["ELASTANE_ELASTICJOB"] == "j"
    assert {"ELASTANE_POD_UID", "ELASTANE_POD_NAME"} <= set(variables_of())


def test_a_variable_of_the_users_stays_as_it_is():
    spec = spec_of()
    container = spec["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["env"] = [
        {"name": "ELASTANE_ELASTICJOB", "value": "mine"},
        {"name": "A", "value": "1"},
    ]
    named = [(one["name"], one.get("value")) for one in worker_of(spec)["env"]]
    assert named[-2:] == [("ELASTANE_ELASTICJOB", "mine"), ("A", "1")]
    assert [name for name, _ in named].count("ELASTANE_ELASTICJOB") == 1


def test_sidecars_and_init_containers_are_left_alone():
    """The original controller injected its arguments into every container."""
    spec = spec_of()
    pod = spec["replicaSpecs"]["Worker"]["template"]["spec"]
    logs = {"name": "logs", "image": "logs:1", "args": ["-f"]}
    pod["containers"].insert(0, copy.deepcopy(logs))
    pod["initContainers"] = [{"name": "fetch", "image": "fetch:1"}]
    made = pod_of(spec)["spec"]
    assert made["containers"][0] == logs
    assert made["initContainers"] == [{"name": "fetch", "image": "fetch:1"}]
    assert made["containers"][1]["args"][0].startswith("--rdzv_backend")


def test_the_template_is_not_changed_by_what_is_made_of_it():
    spec = spec_of()
    before = copy.deepcopy(spec)
    begun(spec)
    assert spec == before


@pytest.mark.parametrize(
    ("policy", "pods"),
    [("ExitCode", "Never"), ("Never", "Never"), ("OnFailure", "OnFailure"), ("Always", "Always")],
)
def test_the_restart_policy_of_pods(policy, pods):
    spec = spec_of(policy=policy)
    spec["replicaSpecs"]["Worker"]["template"]["spec"]["restartPolicy"] = "OnFailure"
    cluster, decision = begun(spec)
    assert cluster.by_name("j-worker-0").manifest["spec"]["restartPolicy"] == pods
    told = "SettedPodTemplateRestartPolicy" in [one.reason for one in decision.events]
    assert told == (pods != "OnFailure")


def test_pods_have_names_in_the_network_and_time_to_drain():
    made = pod_of(spec_of())["spec"]
    assert (made["hostname"], made["subdomain"]) == ("j-worker-0", "j")
    assert made["terminationGracePeriodSeconds"] == 120
    given = changed(terminationGracePeriodSeconds=7)
    assert pod_of(given)["spec"]["terminationGracePeriodSeconds"] == 7


def objects_of(decision):
    made = [action for action in decision.actions if isinstance(action, CreateObject)]
    return {(action.kind, action.name): action.manifest for action in made}


def test_objects_come_before_the_pods_that_need_them():
    _, decision = begun()
    kinds = [isinstance(action, CreatePod) for action in decision.actions]
    assert kinds == sorted(kinds)


def test_one_headless_service_names_all_pods_before_they_are_ready():
    _, decision = begun(spec_of(4))
    services = {
        name: one for (kind, name), one in objects_of(decision).items() if kind == "Service"
    }
    assert set(services) == {"j"}
    spec = services["j"]["spec"]
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"]
    assert spec["selector"] == {"group-name": "elastic.pytorch.org", "job-name": "j"}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"rdzvEndpoint": "j-worker-0:29400"}, {"j-worker-0"}),
        ({"rdzvEndpoint": "other-j-worker-0:29400"}, set()),
        ({"args": ["--peer=j-worker-2"]}, {"j-worker-2"}),
        ({"env": [{"name": "PEERS", "value": "j-worker-$(I)"}]},
         {"j-worker-0", "j-worker-1", "j-worker-2"}),
        ({"command": ["j-worker-9"]}, set()),
    ],
)  # fmt: skip
def test_pods_that_the_manifest_names_have_a_service_each_as_the_originals_had(more, named):
    spec = spec_of(3, rdzvEndpoint=more.pop("rdzvEndpoint", None))
    spec["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0] |= more
    _, decision = begun(spec)
    made = {n: one for (kind, n), one in objects_of(decision).items() if kind == "Service"}
    assert set(made) - {"j"} == named
    for name in named:
        assert made[name]["spec"]["selector"]["replica-index"] == name[-1]


def test_a_jobs_account_is_bound_to_the_installed_cluster_role():
    _, decision = begun()
    binding = objects_of(decision)["RoleBinding", "j"]
    role = binding["roleRef"]
    assert (role["kind"], role["name"]) == ("ClusterRole", "elastane-job")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "j", "namespace": "ns"}]


def test_a_jobs_token_is_a_secret_that_its_pods_get_as_a_variable():
    cluster, decision = begun()
    assert cluster.tokens == {token_of("j-job00000")}
    (env,) = [one for one in worker_of(spec_of())["env"] if one["name"] == "ELASTANE_TOKEN"]
    assert env["valueFrom"]["secretKeyRef"] == {"name": token_of("j-job00000"), "key": "value"}
    (made,) = [one for one in decision.actions if isinstance(one, CreateToken)]
    assert made.manifest["metadata"]["ownerReferences"][0]["uid"] == "job00000-1"
    assert "data" not in made.manifest, "the shell draws it"
    # The report's presence says that the token was made.
    names = [one.name for one in decision.actions]
    assert names.index(token_of("j-job00000")) < names.index("j-report")
    cluster.settle()
    assert sum(isinstance(one, CreateToken) for one in cluster.actions) == 1


@pytest.mark.parametrize("spec", [spec_of(rdzvEndpoint="etcd:2379"), spec_of(launcher="torchrun")])
def test_a_job_with_a_rendezvous_elsewhere_has_no_token_in_the_cluster(spec):
    _, decision = begun(spec)
    assert not [one for one in decision.actions if isinstance(one, CreateToken)]
    assert "ELASTANE_TOKEN" not in [one["name"] for one in worker_of(spec)["env"]]


def test_a_token_that_was_refused_is_tried_later_and_no_pod_is_made_before():
    cluster = Cluster(spec=spec_of())
    token = token_of("j-job00000")
    refusal = Refusal(kind="Secret", name=token, code=403, message="quota", at_s=cluster.now_s)
    cluster.refused = (refusal,)
    decision, _ = cluster.operate()
    assert not [one for one in decision.actions if isinstance(one, CreateToken | CreatePod)]
    assert "FailedCreateSecret" in [told.reason for told in decision.events]


def test_a_deleted_token_is_made_again_for_a_pod_that_lacks_it():
    cluster, _ = begun()
    cluster.tokens.clear()
    cluster.by_name("j-worker-0").waiting = "CreateContainerConfigError"
    cluster.relist()
    cluster.operate()
    assert cluster.tokens == {token_of("j-job00000")}


def test_a_token_of_the_users_replaces_the_jobs():
    given = {"name": "ELASTANE_TOKEN", "value": "mine"}
    spec = spec_of()
    spec["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["env"] = [given]
    assert [one for one in worker_of(spec)["env"] if one["name"] == given["name"]] == [given]


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        (spec_of(rdzvEndpoint="etcd:2379"), {"Service", "ConfigMap"}),
        (spec_of(launcher="torchrun"), {"Service", "ConfigMap"}),
        (changed(serviceAccountName="mine"), {"Service", "ConfigMap"}),
        (spec_of(), {"Service", "ConfigMap", "ServiceAccount", "RoleBinding"}),
    ],
)
def test_access_is_given_only_where_it_is_needed(spec, kinds):
    cluster, decision = begun(spec)
    assert {kind for kind, _ in objects_of(decision)} == kinds
    account = cluster.by_name("j-worker-0").manifest["spec"].get("serviceAccountName")
    named = spec["replicaSpecs"]["Worker"]["template"]["spec"].get("serviceAccountName")
    assert account == (named or ("j" if "RoleBinding" in kinds else None))


def test_the_directive_holds_the_bounds_and_an_edit_reaches_it():
    cluster, _ = begun(spec_of(2, 1, 4))
    held = cluster.objects["ConfigMap", "j-directive"]
    assert held["data"] == {"min": "1", "max": "4", "replicas": "2", "fenced": "", "dead": ""}
    cluster.edit(spec_of(3, 2, 6))
    cluster.settle()
    held = cluster.objects["ConfigMap", "j-directive"]
    assert held["data"] == {"min": "2", "max": "6", "replicas": "3", "fenced": "", "dead": ""}


def test_an_object_that_another_client_changed_or_removed_is_mended():
    cluster, _ = begun()
    del cluster.objects["Service", "j"]
    cluster.objects["ConfigMap", "j-directive"]["data"] = {"min": "9", "odd": "1"}
    binding = cluster.objects["RoleBinding", "j"]
    binding["metadata"]["annotations"][MADE_OF] = "an older version's"
    binding["roleRef"] = {"kind": "Role", "name": "j"}
    cluster.settle()
    assert ("Service", "j") in cluster.objects
    held = cluster.objects["ConfigMap", "j-directive"]["data"]
    assert held == {"min": "1", "max": "4", "replicas": "2", "fenced": "", "dead": ""}
    assert cluster.objects["RoleBinding", "j"]["roleRef"]["kind"] == "ClusterRole"


def test_the_coordinators_report_is_not_overwritten():
    cluster, _ = begun()
    cluster.objects["ConfigMap", "j-report"]["data"] = {"report": "{}"}
    cluster.relist()
    assert not [a for a in cluster.operate()[0].actions if isinstance(a, PatchObject)]


def test_objects_of_a_namesake_are_replaced_and_another_owners_reported():
    cluster, _ = begun()
    for key, kind in ((("Service", "j"), "ElasticJob"), (("RoleBinding", "j"), "Other")):
        cluster.objects[key]["metadata"]["ownerReferences"] = [
            {"uid": "old", "kind": kind, "name": "j", "controller": True}
        ]
    cluster.pods.clear()
    cluster.relist()
    decision, _ = cluster.operate()
    assert [a.name for a in decision.actions if isinstance(a, DeleteObject)] == ["j"]
    assert not [action for action in decision.actions if isinstance(action, CreatePod)]
    degraded = cluster.status.condition("Degraded")
    assert degraded.reason == "NameTaken"
    assert "RoleBinding j belongs to another controller" in degraded.message
    cluster.objects.pop(("RoleBinding", "j"))
    cluster.settle()
    assert cluster.status.phase == "Running"


def test_pods_without_an_owner_are_adopted():
    cluster, _ = begun()
    for pod in cluster.pods.values():
        pod.manifest["metadata"]["ownerReferences"] = []
    cluster.relist()
    decision, _ = cluster.operate()
    assert "Adopted" in [one.reason for one in decision.events]
    assert len(cluster.pods) == 2
    owners = [pod.manifest["metadata"]["ownerReferences"][0] for pod in cluster.pods.values()]
    assert {owner["uid"] for owner in owners} == {"job00000-1"}


def test_pods_that_a_namesake_left_go_first():
    cluster, _ = begun()
    for pod in cluster.pods.values():
        pod.manifest["metadata"]["ownerReferences"][0]["uid"] = "old"
    old = set(cluster.pods)
    cluster.settle()
    assert len(cluster.pods) == 2
    assert not old & set(cluster.pods)


def test_another_owners_pod_of_that_name_is_reported_and_not_touched():
    cluster, _ = begun()
    foreign = cluster.by_name("j-worker-0")
    foreign.manifest["metadata"]["ownerReferences"][0] |= {"uid": "x", "kind": "ReplicaSet"}
    cluster.start(foreign, "n0")
    cluster.settle()
    assert foreign.uid in cluster.pods
    text = "pod j-worker-0 exists and does not belong to the job"
    assert text in cluster.status.condition("Degraded").message
