"""Faults of a manifest are reported by path, value and expectation, and not retried."""

import copy

import pytest
from kube_cluster import Cluster, spec_of

from elastane.kubernetes.model import CreatePod, ElasticJob, Meta, Refusal
from elastane.kubernetes.reconcile.settings import read

WORKER = "spec.replicaSpecs.Worker"
TEMPLATE = f"{WORKER}.template"
FIRST = f"{TEMPLATE}.spec.containers[0]"
MISSING = object()


def with_at(path, value, spec=None):
    """Return a valid spec with one changed value; `path` as in messages, without `spec.`."""
    spec = copy.deepcopy(spec or spec_of(2, 1, 4))
    node = spec
    *steps, last = path.removeprefix("spec.").replace("[", ".[").split(".")
    for step in steps:
        node = node[int(step[1:-1])] if step.startswith("[") else node.setdefault(step, {})
    key = int(last[1:-1]) if last.startswith("[") else last
    if value is MISSING:
        del node[key]
    else:
        node[key] = value
    return spec


def job_of(spec, name="j"):
    return ElasticJob(metadata=Meta(name=name, uid="u", edition=1), spec=spec)


def wrongs(spec, name="j"):
    return read(job_of(spec, name)).wrong


# Path, value, what the message shows, what it expects, reason.
SPEC, POD = "InvalidSpec", "InvalidTemplate"
TABLE = [
    ("spec.minReplicas", 0, "0", "int >= 1", SPEC),
    ("spec.minReplicas", 5, "5", "at most maxReplicas, which is 4", SPEC),
    ("spec.minReplicas", "two", '"two"', "int", SPEC),
    ("spec.maxReplicas", 4097, "4097", "int <= 4096", SPEC),
    ("spec.maxReplicas", True, "true", "int", SPEC),
    ("spec.backoffLimit", -1, "-1", "int >= 0", SPEC),
    ("spec.ttlSecondsAfterFinished", 1.5, "1.5", "int", SPEC),
    ("spec.activeDeadlineSeconds", 0, "0", "int >= 1", SPEC),
    ("spec.cleanPodPolicy", "all", '"all"', "one of All, None, Running", SPEC),
    ("spec.managedBy", "kueue", '"kueue"', "a domain and a name", SPEC),
    ("spec.schedulingPolicy.podGroup", "KAI", '"KAI"', "one of Coscheduling, Kubernetes", SPEC),
    ("spec.schedulingPolicy.queue", "a", '"a"', "none, or podGroup Volcano", SPEC),
    (
        "spec.schedulingPolicy.scheduleTimeoutSeconds",
        9,
        "9",
        "none, or podGroup Coscheduling",
        SPEC,
    ),
    ("spec.suspend", "yes", '"yes"', "bool", SPEC),
    ("spec.launcher", "mpirun", '"mpirun"', "one of elastane, torchrun", SPEC),
    ("spec.spares", 65, "65", "int <= 64", SPEC),
    ("spec.scaleDownPolicy", "Oldest", '"Oldest"', "one of HighestIndex, PendingFirst", SPEC),
    ("spec.nodeLostSeconds", -1, "-1", "int >= 0", SPEC),
    ("spec.rdzvBackend", "zookeeper", '"zookeeper"', "one of c10d, elastane, etcd", SPEC),
    ("spec.rdzvEndpoint", "<your_etcd_endpoint>:<your_etcd_port>", "<your", "host:port", SPEC),
    ("spec.rdzvEndpoint", "etcd:0", '"etcd:0"', "host:port", SPEC),
    ("spec.rdzvEndpoint", "etcd:99999", '"etcd:99999"', "host:port", SPEC),
    ("spec.rdzvEndpoint", "etcd 1:2379", '"etcd 1:2379"', "host:port", SPEC),
    ("spec.rdzvEndpoint", 2379, "2379", "str", SPEC),
    ("spec.runPolicy", [], "[]", "an object", SPEC),
    ("spec.replicaSpecs", MISSING, "(not set)", "what the job consists of", SPEC),
    (WORKER, MISSING, "(not set)", "a value", SPEC),
    (f"{WORKER}.replicas", -1, "-1", "int >= 0", SPEC),
    (f"{WORKER}.replicas", "3", '"3"', "int", SPEC),
    (
        f"{WORKER}.restartPolicy",
        "Sometimes",
        '"Sometimes"',
        "one of Always, ExitCode, ",
        SPEC,
    ),
    (TEMPLATE, MISSING, "(not set)", "a value", SPEC),
    (TEMPLATE, "pod.yaml", '"pod.yaml"', "object", SPEC),
    (f"{TEMPLATE}.spec", MISSING, "(not set)", "the spec of a pod", POD),
    (f"{TEMPLATE}.spec.containers", [], "[]", "at least one container", POD),
    (f"{TEMPLATE}.spec.containers", {}, "{}", "at least one container", POD),
    (f"{TEMPLATE}.spec.initContainers", "x", '"x"', "a list", POD),
    (f"{TEMPLATE}.metadata.labels", {"a": 1}, "1", "a string", POD),
    (f"{TEMPLATE}.metadata", "x", '"x"', "an object", POD),
    (FIRST, None, "null", "a container", POD),
    (f"{FIRST}.name", MISSING, "(not set)", "at most 63 characters of a-z", POD),
    (f"{FIRST}.name", "Worker_1", '"Worker_1"', "at most 63 characters of a-z", POD),
    (f"{FIRST}.image", MISSING, "(not set)", "the name of an image", POD),
    (f"{FIRST}.image", "", '""', "the name of an image", POD),
    (f"{FIRST}.image", "my image", '"my image"', "the name of an image", POD),
    (f"{FIRST}.command", "python", '"python"', "a list of strings", POD),
    (f"{FIRST}.args[0]", 5, "5", "a string (in quotes", POD),
    # KUBERNETES trap 3: `{name: N}` in YAML 1.1.
    (f"{FIRST}.env", [{"name": False, "value": "1"}], "false", "in quotes: YAML reads N", POD),
    (f"{FIRST}.env", [{"name": "A", "value": 1}], "1", "in quotes", POD),
    (f"{FIRST}.env", [{"value": "x"}], "(not set)", "in quotes", POD),
    (f"{FIRST}.env", {"A": "1"}, '{"A":"1"}', "a list of name and value", POD),
    (f"{FIRST}.env", ["A=1"], '"A=1"', "name and value", POD),
]


@pytest.mark.parametrize(("path", "value", "shown", "expected", "reason"), TABLE)
def test_a_mistake_is_named_with_its_path_its_value_and_what_was_expected(
    path, value, shown, expected, reason
):
    found = wrongs(with_at(path, value))
    assert len(found) == 1, found
    assert found[0].path.startswith(path)
    assert shown in found[0].value
    assert expected in found[0].expected
    assert found[0].reason == reason
    assert str(found[0]) == f"{found[0].path} = {found[0].value}: expected {found[0].expected}"


@pytest.mark.parametrize("spec", [None, [], "x", 7])
def test_a_spec_that_is_not_an_object_is_refused(spec):
    assert wrongs(spec)[0].path == "spec"


@pytest.mark.parametrize("name", ["J", "1j", "j.k", "j" * 52, "-j", "j-", ""])
def test_a_job_whose_name_no_service_could_have_is_refused(name):
    assert [one.path for one in wrongs(spec_of(), name)] == ["metadata.name"]
    assert not wrongs(spec_of(), "j" * 51)


def test_all_mistakes_of_a_manifest_are_reported_at_once():
    spec = with_at("spec.minReplicas", 0, with_at("spec.backoffLimit", "x", spec_of(policy="No")))
    paths = {one.path for one in wrongs(spec)}
    assert paths == {"spec.minReplicas", "spec.backoffLimit", f"{WORKER}.restartPolicy"}


RELATIONS = [
    ({"spares": 1, "launcher": "torchrun"}, "spec.spares"),
    ({"rdzvBackend": "kubernetes", "launcher": "torchrun"}, "spec.rdzvBackend"),
    ({"rdzvBackend": "file", "launcher": "torchrun", "rdzvEndpoint": "/x"}, "spec.rdzvBackend"),
    ({"rdzvBackend": "kubernetes", "rdzvEndpoint": "x:1"}, "spec.rdzvEndpoint"),
    ({"rdzvBackend": "etcd"}, "spec.rdzvBackend"),
    ({"rdzvBackend": "etcd-v2"}, "spec.rdzvBackend"),
    ({"rdzvBackend": "redis"}, "spec.rdzvBackend"),
    ({"rdzvBackend": "file", "rdzvEndpoint": "shared"}, "spec.rdzvEndpoint"),
    ({"exitCodeRules": [{"codes": [0], "action": "Retry"}]}, "spec.exitCodeRules[0].codes[0]"),
    ({"exitCodeRules": [{"codes": ["9-3"], "action": "Fail"}]}, "spec.exitCodeRules[0].codes[0]"),
    ({"exitCodeRules": [{"codes": [1, "x"], "action": "Fail"}]}, "spec.exitCodeRules[0].codes[1]"),
    ({"exitCodeRules": [{"codes": [1], "action": "No"}]}, "spec.exitCodeRules[0].action"),
    ({"exitCodeRules": [{"codes": [256], "action": "Fail"}]}, "spec.exitCodeRules[0].codes[0]"),
    ({"backoffLimit": 3, "runPolicy": {"backoffLimit": 4}}, "spec.runPolicy.backoffLimit"),
    (
        {"runPolicy": {"suspend": True}, "RunPolicy": {"suspend": False}},
        "spec.RunPolicy.suspend",
    ),
]


@pytest.mark.parametrize(("more", "path"), RELATIONS, ids=str)
def test_fields_that_contradict_each_other_are_refused(more, path):
    assert [one.path for one in wrongs(spec_of(**more))] == [path]


def test_rules_for_exit_codes_belong_to_the_policy_of_that_name():
    rules = [{"codes": [3], "action": "Retry"}]
    assert not wrongs(spec_of(exitCodeRules=rules))
    for policy in ("OnFailure", "Never", "Always"):
        found = wrongs(spec_of(policy=policy, exitCodeRules=rules))
        assert [one.path for one in found] == [f"{WORKER}.restartPolicy"]


def test_a_contradiction_hides_no_other_mistake():
    spec = spec_of(backoffLimit=3, runPolicy={"backoffLimit": 4}, minReplicas=9, maxReplicas=8)
    found = [one.path for one in wrongs(spec, name="Not-A-Name")]
    assert found == ["metadata.name", "spec.runPolicy.backoffLimit", "spec.minReplicas"]


@pytest.mark.parametrize(
    "endpoint",
    [
        "etcd-service:2379", "etcd-service", "10.0.0.7:2379", "http://etcd:2379", "[fd00::1]:2379",
        "[fd00::1]", "a:2379,b:2379", "j-worker-0:29400", "etcd.ns.svc.cluster.local.:2379",
    ],
)  # fmt: skip
def test_endpoints_as_people_write_them_are_taken(endpoint):
    assert not wrongs(spec_of(rdzvEndpoint=endpoint))


def test_sidecars_are_welcome_and_the_one_that_trains_must_be_known_among_several():
    other = {"name": "logs", "image": "logs:1"}
    spec = spec_of()
    pod = spec["replicaSpecs"]["Worker"]["template"]["spec"]
    pod["containers"].append(other)
    assert read(job_of(spec)).settings.container == "elasticjob-worker"
    pod["containers"][0]["name"] = "main"
    assert [one.path for one in wrongs(spec)] == [f"{TEMPLATE}.spec.containers[*].name"]
    pod["containers"].pop()
    assert read(job_of(spec)).settings.container == "main"
    pod["containers"] = [dict(other), dict(other)]
    pod["containers"].append({"name": "elasticjob-worker", "image": "x"})
    assert "a name that no other has" in wrongs(spec)[0].expected


# minReplicas, maxReplicas, replicas: the range that is used, and the number in it.
RANGES = [
    (None, None, 3, (3, 3, 3)),
    (None, None, 0, (1, 1, 1)),
    (2, None, 5, (2, 5, 5)),
    (2, None, 1, (2, 2, 2)),
    (None, 4, 2, (2, 4, 2)),
    (None, 4, 9, (4, 4, 4)),
    (1, 3, 7, (1, 3, 3)),
    (2, 3, 0, (2, 3, 2)),
    (3, 3, 3, (3, 3, 3)),
    (None, None, 9999, (4096, 4096, 4096)),
]


@pytest.mark.parametrize(("least", "most", "asked", "used"), RANGES)
def test_bounds_have_defaults_and_replicas_stay_between_them(least, most, asked, used):
    spec = spec_of(asked, least, most)
    found = read(job_of(spec)).settings
    assert (found.min, found.max, found.desired) == used


def test_a_job_without_replicas_has_one():
    """The original dereferenced nil."""
    spec = with_at(f"{WORKER}.replicas", MISSING, spec_of(1, None, None))
    assert read(job_of(spec)).settings.desired == 1


@pytest.mark.parametrize("where", ["top", "runPolicy", "RunPolicy"])
def test_the_original_spellings_of_the_run_policy_mean_the_same(where):
    policy = {"cleanPodPolicy": "All", "backoffLimit": 3, "ttlSecondsAfterFinished": 9}
    more = policy if where == "top" else {where: policy}
    found = read(job_of(spec_of(**more))).settings.spec
    told = (found.clean_pod_policy, found.backoff_limit, found.ttl_seconds_after_finished)
    assert told == ("All", 3, 9)


def test_null_is_as_not_set():
    spec = spec_of(backoffLimit=None, rdzvEndpoint=None, runPolicy=None) | {"maxReplicas": None}
    assert not wrongs(spec)


# What becomes of a job with such a spec.


def test_a_job_that_cannot_be_understood_fails_at_once_and_is_tried_no_more():
    cluster = Cluster(spec=spec_of(2, 5, 4))
    decision, _ = cluster.operate()
    assert not decision.actions
    failed = cluster.status.condition("Failed")
    assert (failed.reason, failed.observed_generation) == ("InvalidSpec", 1)
    assert failed.message == "spec.minReplicas = 5: expected at most maxReplicas, which is 4"
    assert [event.reason for event in decision.events] == ["InvalidSpec"]
    assert decision.again_in_s is None
    decision, _ = cluster.operate()
    assert (decision.actions, decision.events) == ((), ())


def test_an_edit_lets_such_a_job_begin():
    cluster = Cluster(spec=spec_of(2, 5, 4))
    cluster.settle()
    cluster.edit(spec_of(2, 9, 4))
    cluster.settle()
    assert "9: expected" in cluster.status.condition("Failed").message
    cluster.edit(spec_of(2, 1, 4))
    cluster.settle()
    assert cluster.status.phase == "Running"
    assert cluster.status.condition("Failed") is None
    assert cluster.status.completion_time is None


def test_a_typing_error_does_not_end_a_running_job():
    cluster = Cluster(spec=spec_of(2, 1, 4))
    cluster.settle()
    cluster.edit(spec_of(3, 5, 4))
    cluster.settle()
    assert len(cluster.pods) == 2
    assert cluster.status.condition("Degraded").reason == "InvalidSpec"
    assert cluster.status.is_("Running")
    assert not cluster.status.is_("Failed")
    cluster.edit(spec_of(3, 1, 4))
    cluster.settle()
    assert (len(cluster.pods), cluster.status.phase) == (3, "Running")


def refused(code, message="spec.containers[0].image: Required value", times=1, **more):
    return Refusal(kind="Pod", name="j-worker-0", code=code, message=message, times=times, **more)


@pytest.mark.parametrize("code", [400, 422])
def test_an_invalid_pod_ends_the_job_with_the_servers_message(code):
    cluster = Cluster(spec=spec_of())
    cluster.refused = (refused(code),)
    decision, _ = cluster.operate()
    assert not [action for action in decision.actions if isinstance(action, CreatePod)]
    failed = cluster.status.condition("Failed")
    assert failed.reason == "InvalidTemplate"
    assert f"{TEMPLATE}: the API server refused pod j-worker-0" in failed.message
    assert "spec.containers[0].image: Required value" in failed.message
    cluster.refused = ()
    cluster.edit(spec_of(3))
    cluster.settle()
    assert cluster.status.phase == "Running"


def test_a_template_that_is_broken_later_stops_replacement_and_not_the_job():
    cluster = Cluster(spec=spec_of(2))
    cluster.settle()
    cluster.edit(spec_of(3))
    cluster.refused = (refused(422),)
    cluster.settle()
    assert cluster.status.condition("Degraded").reason == "InvalidTemplate"
    assert len(cluster.pods) == 2
    assert cluster.status.is_("Running")


def test_without_its_service_a_job_makes_no_pods_and_says_why():
    """The original swallowed errors of creating Services."""
    cluster = Cluster(spec=spec_of(1))
    cluster.refused = (Refusal(kind="Service", name="j", code=403, message="no", at_s=1e9),)
    decision, _ = cluster.operate()
    assert not cluster.pods
    assert ("FailedCreateService", "j: no") in [(e.reason, e.message) for e in decision.events]
    assert "Service j was refused: no" in cluster.status.condition("Running").message


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (403, 'pods "j-worker-0" is forbidden: exceeded quota: gpus', "QuotaExceeded"),
        (403, 'error looking up service account ns/j: "j" not found', "Forbidden"),
        (409, 'pods "j-worker-0" already exists', "NameTaken"),
        (404, "namespaces not found", "Refused"),
    ],
)
def test_a_refusal_that_may_pass_is_named_and_tried_again_after_a_pause(code, message, reason):
    cluster = Cluster(spec=spec_of(1))
    cluster.refused = (refused(code, message, times=3, at_s=cluster.now_s),)
    decision, _ = cluster.operate()
    assert decision.again_in_s == 4.0
    assert message in cluster.status.condition("Running").message
    assert cluster.status.condition("Running").reason == reason
    first = decision.events[0]
    assert (first.type, first.reason) == ("Warning", "FailedCreatePod")
    assert not cluster.pods
    cluster.now_s += 4
    cluster.operate()
    assert len(cluster.pods) == 1


@pytest.mark.parametrize(
    ("asked", "is_valid"), [(0, False), (1, False), (2, True), (4, True), (5, False)]
)
def test_the_minimum_of_a_group_is_between_the_bounds_of_the_job(asked, is_valid):
    policy = {"podGroup": "Coscheduling", "minAvailable": asked}
    found = [str(one) for one in wrongs(spec_of(3, 2, 4, schedulingPolicy=policy))]
    assert (found == []) is is_valid
    assert is_valid or f"minAvailable = {asked}: expected 2 to 4" in found[0]
    # Without a group it means nothing, as in manifests of the original.
    assert not wrongs(spec_of(3, 2, 4, schedulingPolicy={"minAvailable": asked}))
