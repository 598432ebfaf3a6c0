"""The operator as `install` sets it up, with its rights alone, against a real API server."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest
from bed.parts import Part
from elastic_jobs import JOBS, install_definition, older_server
from jobs import until

from elastane.kubernetes.model.names import API_VERSION

VERB = [sys.executable, "-m", "elastane", "kubernetes"]


def printed(*words):
    done = subprocess.run([*VERB, *words], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.fixture
def installed(control_plane):
    """The kubeconfig of the operator's own account, which has the rights that it was given."""
    control_plane.kubectl(
        "apply",
        "-f",
        "-",
        given=printed(
            "install", "--image", "none", "--replicas", "0", *older_server(control_plane)
        ),
    )
    install_definition(control_plane)
    return control_plane.account("elastane-operator", "elastane-system")


@pytest.fixture
def start(installed, namespace, tmp_path):
    parts = []
    # Of another test's operator, which was killed, the lease would be waited for.
    lease = ["--lease-namespace", "elastane-system", "--lease-name", namespace]

    def begin(name, *words):
        part = Part(name, tmp_path)
        part.start([*VERB, "operator", "--kubeconfig", str(installed), *lease, *words])
        parts.append(part)
        return part

    yield begin
    for part in parts:
        part.kill()
        print(part.tail(60))  # shown where the test fails


def pods(plane, namespace, job="train"):
    path = f"/api/v1/namespaces/{namespace}/pods?labelSelector=job-name%3D{job}"
    return sorted(one["metadata"]["name"] for one in plane.ask("GET", path)["items"])


def render(plane, namespace, *words):
    manifest = printed("render", "--name", "train", "--image", "none", *words, "train.py")
    plane.kubectl("apply", "-f", "-", given=manifest, namespace=namespace)


def end(plane, namespace):
    """Delete the job; its pods go by the operator, the garbage collector learns of it later."""
    leave = ("--cascade=foreground", "--wait=false")
    plane.kubectl("delete", "ej/train", *leave, namespace=namespace)
    until(lambda: pods(plane, namespace) == [], "no pods")


def workers(count):
    return [f"train-worker-{index}" for index in range(count)]


def test_a_job_lives_and_ends_with_the_rights_that_install_gives(control_plane, namespace, start):
    plane = control_plane
    operator = start("one")
    render(plane, namespace, "--replicas", "2", "--min", "1", "--max", "4")
    until(lambda: pods(plane, namespace) == workers(2), "two pods")
    plane.kubectl("scale", "ej/train", "--replicas=3", namespace=namespace)
    until(lambda: pods(plane, namespace) == workers(3), "three pods")
    operator.kill()
    plane.kubectl("delete", "lease", namespace, namespace="elastane-system")
    plane.kubectl("delete", "pod", "train-worker-1", namespace=namespace)
    plane.kubectl("scale", "ej/train", "--replicas=2", namespace=namespace)
    successor = start("two")
    until(lambda: pods(plane, namespace) == workers(2), "two pods again")
    told = plane.kubectl("get", "ej/train", namespace=namespace)
    assert "train" in told and "STATE" in told
    owned = plane.kubectl("get", "sa,role,rolebinding,cm,svc", namespace=namespace)
    assert "train-directive" in owned and "train-report" in owned
    end(plane, namespace)
    for part in (operator, successor):
        lines = part.tail(200).splitlines()
        # Of another test's namespace it may have seen the end, in which nobody may create.
        lacking = [x for x in lines if "forbidden" in x and "being terminated" not in x]
        assert not lacking, lacking
        assert "Traceback" not in part.tail(200), part.tail(200)


TEMPLATE = {
    "apiVersion": API_VERSION,
    "kind": "ElasticJobTemplate",
    "metadata": {"name": "gpu"},
    "spec": {
        "overridable": ["args", "replicas"],
        "job": {
            "minReplicas": 1,
            "maxReplicas": 4,
            "replicaSpecs": {
                "Worker": {
                    "template": {
                        "spec": {
                            "containers": [
                                {
                                    "name": "elasticjob-worker",
                                    "image": "none",
                                    "args": ["--max-restarts=9"],
                                }
                            ]
                        }
                    }
                }
            },
        },
    },
}


def test_a_job_is_made_once_of_the_template_that_it_names(control_plane, namespace, start):
    plane = control_plane
    root = f"/apis/{API_VERSION}/namespaces/{namespace}"
    templates = f"{root}/elasticjobtemplates"

    def failure(job="train"):
        status = plane.ask("GET", f"{root}/elasticjobs/{job}").get("status", {})
        told = (one for one in status.get("conditions", ()) if one["type"] == "Failed")
        return next(told, {}).get("message", "")

    start("one")
    job = printed(
        "render", "--template", "gpu", "--name", "train", "--replicas", "2", "train.py", "--lr=1"
    )
    plane.kubectl("apply", "-f", "-", given=job, namespace=namespace)
    until(lambda: "the name of an ElasticJobTemplate" in failure(), "the template is missing")
    plane.ask("POST", templates, TEMPLATE)
    until(lambda: pods(plane, namespace) == workers(2), "two pods")
    pod = plane.ask("GET", f"/api/v1/namespaces/{namespace}/pods/train-worker-0")
    args = pod["spec"]["containers"][0]["args"]
    assert args[-3:] == ["--max-restarts=9", "train.py", "--lr=1"]
    # Neither its user's manifest, applied again, nor another template of that name changes the job.
    plane.ask("DELETE", f"{templates}/gpu")
    assert "unchanged" in plane.kubectl("apply", "-f", "-", given=job, namespace=namespace)
    plane.ask("POST", templates, TEMPLATE)
    three = {"spec": {"replicas": 3}}
    plane.ask("PATCH", f"{root}/elasticjobs/train/scale", three, kind="merge-patch+json")
    until(lambda: pods(plane, namespace) == workers(3), "three pods")
    made = plane.ask("GET", f"{root}/elasticjobs/train")
    assert made["status"]["jobTemplate"] == "gpu, edition 1"
    head = {"apiVersion": made["apiVersion"], "kind": made["kind"]}
    asked = {"templateRef": {"name": "gpu", "image": "mine"}}
    plane.ask("POST", f"{root}/elasticjobs", head | {"metadata": {"name": "other"}, "spec": asked})
    until(lambda: "templateRef.image" in failure("other"), "what the template does not allow")
    wrong = TEMPLATE | {"metadata": {"name": "b"}, "spec": TEMPLATE["spec"] | {"overridable": [1]}}
    with pytest.raises(AssertionError, match="overridable"):
        plane.ask("POST", templates, wrong)
    end(plane, namespace)


def test_of_two_operators_the_second_acts_once_the_first_is_asked_to_end(
    control_plane, namespace, start
):
    plane = control_plane
    first = start("first")
    render(plane, namespace, "--replicas", "1", "--max", "2")
    until(lambda: pods(plane, namespace) == workers(1), "a pod")
    second = start("second", "--metrics-port", "0", "--json-logs")
    until(lambda: "probes and metrics on port" in second.tail(50), "its port")
    line = next(line for line in second.tail(50).splitlines() if "probes" in line)
    port = json.loads(line)["message"].split()[-1]

    def asked(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.read().decode()

    assert asked("/healthz") == "ok\n"
    assert "elastane_operator_leader 0" in asked("/metrics")
    first.send(signal.SIGTERM)
    assert first.process.wait(90) == 0, first.tail()
    plane.kubectl("scale", "ej/train", "--replicas=2", namespace=namespace)
    until(lambda: pods(plane, namespace) == workers(2), "two pods")
    until(lambda: "elastane_operator_leader 1" in asked("/metrics"), "the second to lead")
    end(plane, namespace)


def test_a_template_that_the_server_refuses_ends_in_a_condition(control_plane, namespace, start):
    plane = control_plane
    start("one")
    manifest = printed("render", "--name", "train", "--image", "none", "train.py")
    wrong = manifest.replace("image: none", "image: none\n            env: [{name: N}, {value: x}]")
    plane.kubectl("apply", "-f", "-", given=wrong, namespace=namespace)

    def failed():
        job = plane.ask("GET", f"{JOBS.format(namespace)}/train")
        told = job.get("status", {}).get("conditions", [])
        return [one for one in told if one["type"] == "Failed" and one["status"] == "True"]

    until(failed, "the condition")
    shown = subprocess.run(
        [*VERB, "status", "train", "-n", namespace, "--kubeconfig", str(plane.admin)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 1, shown.stderr
    assert "Failed" in shown.stdout and "env" in shown.stdout, shown.stdout
