"""deploy/: every way of installation gives the objects of `elastane kubernetes install`.

The charts are rendered by helm_subset, since Helm is not at hand where tests run; what of Helm's
language it does not know, they may not use.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from helm_subset import render_chart, render_notes, values_of

from elastane.cli.main import main
from elastane.kubernetes.model.names import job_labels
from elastane.kubernetes.schema import definition

DEPLOY = Path(__file__).parents[2] / "deploy"
CHARTS = DEPLOY / "helm"
SPACE = "elastane-system"


def printed(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["kubernetes", *words]) == 0
    return list(yaml.safe_load_all(out.getvalue()))


def by_name(documents):
    made = {}
    for one in documents:
        meta = one["metadata"]
        key = (one["kind"], meta.get("namespace", ""), meta["name"])
        assert key not in made
        made[key] = one
    return made


def generated():
    spec = importlib.util.spec_from_file_location("deploy_generate", DEPLOY / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.files()


def checked(chart, values):
    schema = json.loads((CHARTS / chart / "values.schema.json").read_text())
    jsonschema.validate(values_of(CHARTS / chart, values), schema)


@pytest.mark.parametrize(("path", "text"), list(generated().items()), ids=lambda one: str(one)[:60])
def test_generated_files_are_up_to_date(path, text):
    assert (DEPLOY / path).read_text() == text, "python deploy/generate.py"


IMAGE = {"image": {"repository": "r/e"}}
OPERATORS = [
    (IMAGE, ("--image=r/e",)),
    (IMAGE | {"replicas": 2}, ("--image=r/e", "--replicas=2")),
    ({"image": {"repository": "r/e", "tag": "1.0"}}, ("--image=r/e:1.0",)),
    (IMAGE | {"watchNamespace": "jobs"}, ("--image=r/e", "--watch-namespace=jobs")),
    (IMAGE | {"watchNamespace": SPACE}, ("--image=r/e", f"--watch-namespace={SPACE}")),
]
OTHER_VALUES = {
    "image": {"repository": "r/e", "pullPolicy": "Always"},
    "podMonitor": True,
    "prometheusRule": True,
    "monitorLabels": {"release": "stack"},
    "imagePullSecrets": [{"name": "key"}],
    "jsonLogs": True,
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
}


@pytest.mark.parametrize(("values", "options"), OPERATORS, ids=str)
def test_the_operators_chart_is_what_install_prints(values, options):
    chart = CHARTS / "elastane-operator"
    checked("elastane-operator", values)
    made = render_chart(chart, "elastane-operator", SPACE, values)
    for path in (chart / "crds").glob("*.yaml"):
        made += yaml.safe_load_all(path.read_text())
    wanted = by_name(printed("install", *options))
    # helm install --create-namespace makes it.
    del wanted["Namespace", "", SPACE]
    assert by_name(made) == wanted


def test_the_operators_chart_follows_its_release_and_its_other_values():
    values = OTHER_VALUES
    checked("elastane-operator", values)
    made = render_chart(CHARTS / "elastane-operator", "mine", "ops", values)
    (operator,) = [one for one in made if one["kind"] == "Deployment"]
    template = operator["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert operator["metadata"]["namespace"] == "ops"
    assert {"--lease-namespace=ops", "--json-logs"} <= set(container["args"])
    assert container["imagePullPolicy"] == "Always"
    assert template["metadata"]["annotations"] == {"a": "b"}
    for key in ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert template["spec"][key] == values[key]
    (monitor,) = [one for one in made if one["kind"] == "PodMonitor"]
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": container["ports"][0]["name"]}]
    (rule,) = [one for one in made if one["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    assert [one["metadata"]["labels"]["release"] for one in (monitor, rule)] == ["stack"] * 2
    (binding,) = [one for one in made if one["kind"] == "ClusterRoleBinding"]
    assert binding["subjects"][0]["namespace"] == "ops"


def test_the_operators_chart_says_how_to_look_and_to_upgrade():
    chart = CHARTS / "elastane-operator"
    notes = render_notes(chart, "mine", "ops", IMAGE | {"watchNamespace": "jobs"})
    assert "runs in ops, for jobs of jobs." in notes and "podMonitor=true" in notes
    assert (chart / re.search(r"apply -f (\S+)", notes)[1]).is_dir()
    notes = render_notes(chart, "mine", "ops", IMAGE | {"podMonitor": True})
    assert "runs in ops." in notes and "podMonitor" not in notes


def test_a_second_release_leaves_out_the_roles_of_the_cluster():
    values = IMAGE | {"watchNamespace": "jobs", "clusterRoles": False}
    checked("elastane-operator", values)
    made = render_chart(CHARTS / "elastane-operator", "x", SPACE, values)
    roles = [one["metadata"]["name"] for one in made if one["kind"] == "ClusterRole"]
    assert roles == ["elastane-operator-jobs"]


def test_the_operators_chart_is_refused_without_an_image():
    with pytest.raises(jsonschema.ValidationError):
        checked("elastane-operator", {})


PLAIN = {"image": "train:1", "args": ["train.py"]}
WHOLE = {
    "image": "train:1",
    "args": ["--max-restarts=9", "train.py", "--epochs=3", "a b", "yes"],
    "nprocPerNode": 2,
    "replicas": 4,
    "restartPolicy": "OnFailure",
    "spec": {"minReplicas": 2, "maxReplicas": 8, "backoffLimit": 0, "suspend": True}
    | {"launcher": "torchrun", "rdzvEndpoint": "etcd:2379", "ttlSecondsAfterFinished": 1_000_000},
    "gpus": 8,
    "cpu": "4",
    "memory": "16Gi",
    "shm": "8Gi",
    "env": [{"name": "N", "value": "no"}],
    "volumes": [{"name": "volume-0", "persistentVolumeClaim": {"claimName": "c"}}],
    "volumeMounts": [{"name": "volume-0", "mountPath": "/c", "readOnly": True}],
}
WHOLE_OPTIONS = (
    "--replicas=4", "--min=2", "--max=8", "--nproc-per-node=2", "--restart-policy=OnFailure",
    "--backoff-limit=0", "--suspend", "--launcher=torchrun", "--rdzv-endpoint=etcd:2379",
    "--ttl=1000000", "--gpus=8", "--cpu=4", "--memory=16Gi", "--shm=8Gi", "--env=N=no",
    "--volume=c:/c:ro", *WHOLE["args"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("values", "options"),
    [(PLAIN, ("train.py",)), (WHOLE, WHOLE_OPTIONS)],
    ids=["least", "whole"],
)
def test_the_jobs_chart_is_what_render_prints(values, options):
    checked("elastic-job", values)
    (made,) = render_chart(CHARTS / "elastic-job", "x", "ns", values)
    (wanted,) = printed("render", "--name=x", "--namespace=ns", "--image=train:1", *options)
    assert made == wanted


PASSED_ON = PLAIN | {
    "command": ["python", "-m", "torch.distributed.run"],
    "imagePullPolicy": "Always",
    "labels": {"a": "b"},
    "annotations": {"c": "d"},
    "podLabels": {"kueue.x-k8s.io/queue-name": "q"},
    "podAnnotations": {"e": "f"},
    "pod": {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"operator": "Exists"}]},
}


def test_the_jobs_chart_passes_on_all_else():
    values = PASSED_ON
    checked("elastic-job", values)
    (made,) = render_chart(CHARTS / "elastic-job", "x", "ns", values)
    template = made["spec"]["replicaSpecs"]["Worker"]["template"]
    (container,) = template["spec"]["containers"]
    assert (made["metadata"]["labels"], made["metadata"]["annotations"]) == ({"a": "b"}, {"c": "d"})
    assert template["metadata"] == {"labels": values["podLabels"], "annotations": {"e": "f"}}
    assert template["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert container["command"] == values["command"]
    assert container["imagePullPolicy"] == "Always"
    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    jsonschema.validate(made, schema)


MEASURED = PLAIN | {"metricsPort": 9470, "podMonitor": True, "monitorLabels": {"release": "s"}}


def test_the_jobs_chart_gives_its_pods_a_port_of_metrics_and_a_monitor_of_it():
    checked("elastic-job", MEASURED)
    job, monitor = render_chart(CHARTS / "elastic-job", "x", "ns", MEASURED)
    (container,) = job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["args"] == ["--metrics-port=9470", "train.py"]
    assert container["ports"] == [{"name": "metrics", "containerPort": 9470}]
    assert monitor["kind"] == "PodMonitor" and monitor["metadata"]["labels"] == {"release": "s"}
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "metrics"}]
    assert monitor["spec"]["selector"]["matchLabels"] == job_labels("x")


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"image": "x", "spec": {"minReplicas": 0}},
        {"image": "x", "spec": {"minreplicas": 1}},
        {"image": "x", "restartPolicy": "never"},
        {"image": "x", "cpu": 4},
        {"image": "x", "podLabels": {"a": True}},
        {"image": "x", "pod": {"containers": []}},
    ],
    ids=str,
)
def test_values_that_make_no_job_are_refused_before_anything_is_made(wrong):
    with pytest.raises(jsonschema.ValidationError):
        checked("elastic-job", wrong)


@pytest.mark.parametrize("chart", ["elastane-operator", "elastic-job"])
def test_every_value_of_a_chart_is_explained_and_known_to_its_schema(chart):
    text = (CHARTS / chart / "values.yaml").read_text()
    schema = json.loads((CHARTS / chart / "values.schema.json").read_text())
    values = yaml.safe_load(text)
    assert set(values) == set(schema["properties"]) - {"global"}
    jsonschema.Draft7Validator.check_schema(schema)
    # A comment before each paragraph of values.
    for paragraph in re.split(r"\n\n+", text.strip()):
        assert paragraph.startswith(("#", "podAnnotations", "resources")), paragraph
    meta = yaml.safe_load((CHARTS / chart / "Chart.yaml").read_text())
    assert meta["apiVersion"] == "v2" and meta["name"] == chart


def test_the_charts_are_of_this_version():
    import elastane

    for chart in ("elastane-operator", "elastic-job"):
        meta = yaml.safe_load((CHARTS / chart / "Chart.yaml").read_text())
        assert (meta["version"], meta["appVersion"]) == (elastane.__version__,) * 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Return Go's text/template, on which Helm is built."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("NOT RUN: the charts by Go's text/template: missing: go")
    made = tmp_path_factory.mktemp("engine") / "engine"
    source = Path(__file__).parents[1] / "shared" / "helm_engine.go"
    environ = os.environ | {"GO111MODULE": "off", "GOCACHE": str(made.with_name("cache"))}
    environ |= {"GOPATH": str(made.with_name("path")), "HOME": str(made.parent)}
    subprocess.run([go, "build", "-o", made, source], env=environ, check=True, timeout=300)
    return made


@pytest.mark.soak
@pytest.mark.parametrize(
    ("chart", "values"),
    [
        *(("elastane-operator", values) for values, _ in OPERATORS),
        ("elastane-operator", OTHER_VALUES),
        *(("elastic-job", values) for values in (PLAIN, WHOLE, PASSED_ON, MEASURED)),
    ],
    ids=lambda one: str(one)[:60],
)
def test_gos_own_engine_renders_the_same(engine, chart, values):
    folder = CHARTS / chart
    root = {"Values": values_of(folder, values), "Release": {"Name": "x", "Namespace": SPACE}}
    done = subprocess.run(
        [engine, folder], input=json.dumps(root), capture_output=True, text=True, check=True
    )
    told = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    assert told == render_chart(folder, "x", SPACE, values)
