"""`elastane kubernetes`: the objects that it prints, and the status of a job."""

import asyncio
import json

import pytest
import yaml
from kube_operators import GROUP_OF_JOBS, access, job, operator_over, play, settled

from elastane.cli import _kubernetes_view as view
from elastane.cli import main as cli
from elastane.errors import ExitCode, UsageError
from elastane.kubernetes.manifests import JOB_RIGHTS, NODE_RIGHTS, RIGHTS, as_yaml
from elastane.kubernetes.model import ElasticJob, JobStatus, JobTemplate, Meta
from elastane.kubernetes.reconcile import reconcile
from elastane.kubernetes.schema import definitions


def printed(capsys, *words):
    assert cli.main(["kubernetes", *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def test_crd_prints_the_definitions(capsys):
    assert printed(capsys, "crd") == definitions()
    assert printed(capsys, "crd", "--without-rules") == definitions(with_rules=False)


IMAGE = "registry/elastane:1"


def installed(capsys, *words):
    found = printed(capsys, "install", f"--image={IMAGE}", *words)
    return {(one["kind"], one["metadata"]["name"]): one for one in found}, found


def test_the_objects_of_install_can_be_applied_in_order(capsys):
    _, found = installed(capsys)
    kinds = [one["kind"] for one in found]
    assert kinds[:4] == ["Namespace", *2 * ["CustomResourceDefinition"], "ServiceAccount"]
    assert kinds[-1] == "Deployment"


def test_the_operator_runs_without_root_on_a_read_only_file_system(capsys):
    by_name, _ = installed(capsys, "--replicas", "2")
    spec = by_name["Deployment", "elastane-operator"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # OpenShift refuses a user outside the range of the namespace, so the image has the user.
    assert "runAsUser" not in pod["securityContext"]
    assert (container["image"], spec["replicas"]) == (IMAGE, 2)
    assert cli.main([*container["args"], "--help"]) == 0, "an argument is no option of the verb"


def granted(rights):
    return {
        (group, resource, verb)
        for group, resources, verbs, _ in rights
        for resource in resources
        for verb in verbs
    }


def test_install_without_an_image_is_refused(capsys):
    assert cli.main(["kubernetes", "install"]) == ExitCode.USAGE
    assert "--image" in capsys.readouterr().err


def test_the_operator_reads_no_secret_and_changes_no_role():
    rights = granted(RIGHTS + NODE_RIGHTS)
    assert {verb for _, kind, verb in rights if kind == "secrets"} == {"create"}
    assert not [one for one in rights if one[1] in ("roles", "clusterroles")]
    assert not any("*" in part for right in rights | granted(JOB_RIGHTS) for part in right)
    assert not [one for one in granted(JOB_RIGHTS) if one[1] == "secrets"]


def test_the_operator_may_bind_one_cluster_role(capsys):
    by_name, _ = installed(capsys)
    rules = by_name["ClusterRole", "elastane-operator"]["rules"]
    (bind,) = [rule for rule in rules if "bind" in rule["verbs"]]
    assert (bind["resources"], bind["resourceNames"]) == (["clusterroles"], ["elastane-job"])
    assert ("ClusterRole", "elastane-job") in by_name


def test_the_roles_for_users_aggregate_to_those_of_kubernetes(capsys):
    by_name, _ = installed(capsys)
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    for name, roles in {"edit": {"edit", "admin"}, "view": {"view"}}.items():
        made = by_name["ClusterRole", f"elastane-jobs-{name}"]
        labels = made["metadata"]["labels"]
        assert {one.removeprefix(prefix) for one in labels if one.startswith(prefix)} == roles
        verbs = {verb for rule in made["rules"] for verb in rule["verbs"]}
        assert ("delete" in verbs) == (name == "edit")
        assert {group for rule in made["rules"] for group in rule["apiGroups"]} == {GROUP_OF_JOBS}


def test_an_operator_of_one_namespace_has_cluster_rights_on_nodes_only(capsys):
    by_name, found = installed(capsys, "--watch-namespace", "team")
    roles = [(one["metadata"]["namespace"], one["rules"]) for one in found if one["kind"] == "Role"]
    assert [namespace for namespace, _ in roles] == ["team", "elastane-system"]
    assert roles[1][1][0]["resources"] == ["leases"]
    wide = by_name["ClusterRole", "elastane-operator-team"]
    assert [rule["resources"] for rule in wide["rules"]] == [["nodes"]]
    args = by_name["Deployment", "elastane-operator"]["spec"]["template"]["spec"]
    assert "--namespace=team" in args["containers"][0]["args"]


def test_render_prints_the_job_of_its_options(capsys):
    (made,) = printed(
        capsys, "render", "--name", "x", "--image", "i", "--replicas", "2", "--min", "1",
        "--max", "4", "--nproc-per-node", "8", "--gpus", "8",
        "--memory", "64Gi", "--cpu", "16", "--shm", "8Gi",
        "--volume", "data:/data:ro", "--host-path", "/mnt:/scratch", "--env", "A=b=c",
        "--backoff-limit", "3", "--ttl", "60", "--suspend", "--restart-policy", "OnFailure",
        "--launcher", "torchrun", "-n", "team", "--pod-group", "Volcano",
        "train.py", "--lr", "1e-3",
    )  # fmt: skip
    spec, worker = made["spec"], made["spec"]["replicaSpecs"]["Worker"]
    assert (made["metadata"]["namespace"], spec["minReplicas"], spec["maxReplicas"]) == (
        "team",
        1,
        4,
    )
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"], spec["suspend"]) == (3, 60, True)
    assert spec["schedulingPolicy"] == {"podGroup": "Volcano"}
    assert (worker["replicas"], worker["restartPolicy"]) == (2, "OnFailure")
    (container,) = worker["template"]["spec"]["containers"]
    assert container["args"] == ["--nproc-per-node=8", "train.py", "--lr", "1e-3"]
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "8", "memory": "64Gi"},
        "requests": {"cpu": "16"},
    }
    assert container["env"] == [{"name": "A", "value": "b=c"}]
    mounts = {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]}
    assert mounts == {"/dev/shm": False, "/data": True, "/scratch": False}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "2", "--min", "3", "--max", "1"], "at most --max, 1"),
        (["--env", "A"], "--env A"),
        (["--volume", "data"], "WHAT:/PATH"),
        (["--host-path", "/a:/b:rw"], "WHAT:/PATH"),
        (["--host-path", "a:/b"], "an absolute folder"),
        (["--volume", "Data_1:/data"], "--volume Data_1"),
        (["--namespace", "Team_A"], "--namespace Team_A"),
        (["--image", "a b"], "--image a b"),
        (["--memory", "16GB"], "a quantity of Kubernetes, such as 16Gi"),
        (["--cpu", "lots"], "--cpu lots"),
        (["--shm", "8 Gi"], "--shm 8 Gi"),
        (["--gpus", "-1"], "--gpus -1"),
        (["--replicas", "-1"], "--replicas -1"),
    ],
)
def test_render_refuses_specs_that_the_operator_refuses(words, said, capsys):
    assert (
        cli.main(["kubernetes", "render", "--name", "x", "--image", "i", *words]) == ExitCode.USAGE
    )
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["N", "y", "no", "1e3", "0o17", "1_000", ".5", "null", "12:30:45", ""]
)
def test_text_that_yaml_1_1_reads_as_another_type_is_quoted(text):
    written = as_yaml([{"name": text}])
    assert f'name: "{text}"' in written
    assert yaml.safe_load(written) == {"name": text}


def shown(kube, name="x"):
    return view.look(access(kube), name)


def test_status_shows_conditions_pods_and_events_of_a_job():
    async def scenario(kube):
        kube.create("elasticjobs", job(minReplicas=1, maxReplicas=4), group=GROUP_OF_JOBS)
        async with operator_over(kube, decide=reconcile) as running:
            await settled(kube)
            ended = {"exitCode": 137, "signal": 9, "reason": "OOMKilled"}
            container = {
                "name": "elasticjob-worker",
                "restartCount": 3,
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                "lastState": {"terminated": ended},
            }
            status = {"phase": "Running", "containerStatuses": [container]}
            kube.patch("pods", "x-worker-0", {"spec": {"nodeName": "node-7"}})
            kube.patch("pods", "x-worker-0", {"status": status}, subresource="status")
            kube.create("nodes", {"metadata": {"name": "node-7"}}, namespace="")
            await kube.wait(lambda: kube.all("events"))
            await running.stop()
        progress = {"round": 4, "worldSize": 2, "step": 1200, "stepsPerSecond": 2.5}
        incident = {"cause": "worker 1 ran out of memory", "time": "2026-01-01T00:00:00Z"}
        status = {"status": {**progress, "lastIncident": incident}}
        kube.patch("elasticjobs", "x", status, group=GROUP_OF_JOBS, subresource="status")
        found = await shown(kube)
        text = "\n".join(view.lines(found))
        for part in (
            "default/x: ",
            "wanted (min 1, max 4)",
            "round 4, 2 workers",
            "1200, 2.5 a second",
            "worker 1 ran out of memory",
            "ElasticJobCreated",
            "x-worker-0  node-7",
            "signal 9, OOMKilled",
            "x-worker-1  -",
            "Pending",
        ):
            assert part in text, text
        assert "has not answered" not in text
        told = json.loads(view.as_json(found))
        assert [pod["metadata"]["name"] for pod in told["pods"]] == ["x-worker-0", "x-worker-1"]
        assert not found.has_failed

    play(scenario)


def test_status_of_a_missing_job_names_cluster_and_namespace():
    async def scenario(kube):
        with pytest.raises(UsageError, match="no ElasticJob y in namespace default"):
            await shown(kube, "y")

    play(scenario)


def test_status_shows_a_job_without_operator_status_or_readable_events():
    async def scenario(kube):
        kube.create("elasticjobs", job(), group=GROUP_OF_JOBS)
        kube.inject("GET", "/events$", status=403, reason="Forbidden")
        text = "\n".join(view.lines(await shown(kube)))
        assert "default/x: new" in text and "no pods" in text
        assert "has not acted on the newest spec" in text

    play(scenario)


def test_status_names_the_controller_of_a_job_that_is_not_the_operators():
    async def scenario(kube):
        kueue = "kueue.x-k8s.io/multikueue"
        kube.create("elasticjobs", job(managedBy=kueue), group=GROUP_OF_JOBS)
        text = "\n".join(view.lines(await shown(kube)))
        assert f"leaves the job to {kueue}" in text
        assert "has not acted" not in text

    play(scenario)


def test_the_operator_names_the_places_in_which_it_found_no_cluster(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["kubernetes", "operator"]) == ExitCode.CONFIGURATION
    assert "kubeconfig" in capsys.readouterr().err


def test_a_taken_metrics_port_is_reported():
    async def scenario(kube):
        server = await asyncio.start_server(lambda *_: None, None, 0)
        port = server.sockets[0].getsockname()[1]
        async with operator_over(kube, metrics_port=port) as running:
            with pytest.raises(Exception, match=f"--metrics-port {port}"):
                await running.task
        server.close()

    play(scenario)


def test_render_refuses_pods_that_the_operator_refuses(capsys):
    words = ["kubernetes", "render", "--name", "x", "--image", "i"]
    assert cli.main([*words, "--replicas", "5", "--max", "2", "train.py"]) == 2
    assert "--replicas 5: expected" in capsys.readouterr().err


def test_render_prints_a_job_of_a_template(capsys):
    words = ["--name", "x", "--template", "gpu", "--image", "i", "--max", "4", "--env", "A=1"]
    (made,) = printed(capsys, "render", *words, "--max-restarts", "9", "--suspend", "t.py", "--lr")
    assert made["spec"] == {
        "suspend": True,
        "templateRef": {
            "name": "gpu",
            "image": "i",
            "maxReplicas": 4,
            "env": [{"name": "A", "value": "1"}],
            "args": ["--max-restarts=9", "t.py", "--lr"],
        },
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--template", "gpu", "--gpus", "1", "t.py"], "--gpus with --template"),
        (["--template", "gpu", "--shm", "8Gi", "t.py"], "--shm with --template"),
        (["--template", "GPU_8", "t.py"], "--template GPU_8"),
        (["--template", "gpu..8", "t.py"], "at most 253 characters of a-z, 0-9, - and ."),
        (["--template", "gpu", "--min", "3", "--max", "2", "t.py"], "at most --max, 2"),
        (["t.py"], "--image is missing"),
    ],
)
def test_render_refuses_options_that_a_template_has(words, said, capsys):
    assert cli.main(["kubernetes", "render", "--name", "x", *words]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["install", "--image", "i", "--namespace", "Foo_"], "--namespace Foo_"),
        (["install", "--image", "i", "--watch-namespace", "a.b"], "--watch-namespace a.b"),
        (["install", "--image", "i", "--replicas", "-1"], "0 or more"),
        (["install", "--image", "i j"], "without spaces"),
        (["status", "A_b"], "ElasticJob A_b"),
        (["status", ""], "ElasticJob ''"),
        (["operator", "--metrics-port", "65536"], "0 to 65535"),
        (["operator", "--lease-name", "A"], "--lease-name A"),
        (["operator", "--lease-namespace", "-a"], "--lease-namespace"),
    ],
)
def test_names_and_numbers_that_no_cluster_takes_are_refused_at_once(words, said, capsys):
    assert cli.main(["kubernetes", *words]) == ExitCode.USAGE
    told = capsys.readouterr()
    assert said in told.err and not told.out


def test_status_says_of_which_template_a_job_was_made():
    spec = {"templateRef": {"name": "gpu"}}
    job = ElasticJob(metadata=Meta(name="x", namespace="n"), spec=spec)
    status = JobStatus(job_template="gpu, edition 3")
    same, edited = (JobTemplate(metadata=Meta(name="gpu", edition=n)) for n in (3, 5))
    found = view.FoundObjects(job, status, (), (), same)
    assert any(line.endswith("gpu, edition 3") for line in view.lines(found))
    found.template = edited
    assert any("it has 5 by now" in line for line in view.lines(found))
