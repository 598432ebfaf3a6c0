"""The bed itself: what the process kubelet says of pods is true, and its faults are faults."""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from bed.controlplane import ControlPlane
from bed_pods import create, get, headless, pod, state, wait_log, wait_phase, wait_pod

ASK = """
import json, os, ssl, urllib.request, urllib.error
at = "/var/run/secrets/kubernetes.io/serviceaccount/"
host = os.environ["KUBERNETES_SERVICE_HOST"] + ":" + os.environ["KUBERNETES_SERVICE_PORT"]
space = open(at + "namespace").read()
url = f"https://{host}/api/v1/namespaces/{space}/pods"
token = open(at + "token").read()
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
try:
    urllib.request.urlopen(request, context=ssl.create_default_context(cafile=at + "ca.crt"))
except urllib.error.HTTPError as error:
    print(error.code, json.load(error)["message"])
"""
SERVE = """
import socket
server = socket.create_server(("", 29400))
print("serving", flush=True)
while True:
    peer, where = server.accept()
    peer.sendall(socket.gethostname().encode())
    peer.close()
"""
CALL = """
import socket, time
said = ""
while True:
    try:
        with socket.create_connection(("one.group", 29400), 0.3) as peer:
            now = "hears " + peer.recv(100).decode()
    except OSError as error:
        now = "deaf"
    if now != said:
        print(now, flush=True)
    said = now
    time.sleep(0.05)
"""
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(42)))
print("up", flush=True)
while True:
    time.sleep(1)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    time.sleep(1)
"""
FOREVER = "import time; print('up', flush=True); time.sleep(1000)"


def test_a_client_that_prefers_protobuf_is_answered_in_json(control_plane):
    request = urllib.request.Request(f"{control_plane.url}/api/v1/nodes")
    request.add_header("Accept", "application/vnd.kubernetes.protobuf,application/json")
    with urllib.request.urlopen(request, context=control_plane.context(), timeout=10) as answer:
        assert json.load(answer)["kind"] == "NodeList"


def test_the_end_of_a_container_is_reported_as_it_was(control_plane, cluster, namespace):
    cluster.add("ends-0")
    plane, sh = control_plane, {"image": "shell", "restartPolicy": "Never"}
    flaky = 'n=$(cat /x/n 2>/dev/null || echo 0); echo $((n+1)) >/x/n; echo turn $n; [ "$n" = 2 ]'
    mount = {"volumeMounts": [{"name": "x", "mountPath": "/x"}]}
    kept = {"volumes": [{"name": "x", "emptyDir": {}}], "container": mount}
    create(
        plane, namespace,
        pod("fine", "sh", "-c", "echo done at $(hostname)", **sh),
        pod("bad", "sh", "-c", "echo bye; exit 7", **sh),
        pod("missing", "no-such-program", **sh),
        pod("flaky", "sh", "-c", flaky, **sh | {"restartPolicy": "OnFailure"}, **kept),
        pod("greedy", "-c", FOREVER),
        pod("evicted", "-c", FOREVER),
        pod("killed", "-c", FOREVER),
    )  # fmt: skip
    for name in ("greedy", "evicted", "killed"):
        wait_log(plane, namespace, name, "up")
    cluster.tell(namespace, "greedy", "out_of_memory")
    cluster.tell(namespace, "evicted", "evict", message="the node was low on memory")
    cluster.tell(namespace, "killed", "signal", number=9)
    ended = {}
    for name in ("fine", "bad", "missing", "flaky", "greedy", "evicted", "killed"):
        got = wait_phase(plane, namespace, name, "Succeeded", "Failed")
        told = state(got)["terminated"]
        ended[name] = (got["status"]["phase"], told["exitCode"], told["reason"])
    assert ended == {
        "fine": ("Succeeded", 0, "Completed"),
        "bad": ("Failed", 7, "Error"),
        "missing": ("Failed", 128, "StartError"),
        "flaky": ("Succeeded", 0, "Completed"),
        "greedy": ("Failed", 137, "OOMKilled"),
        "evicted": ("Failed", 137, "Error"),
        "killed": ("Failed", 137, "Error"),
    }
    assert get(plane, namespace, "evicted")["status"]["reason"] == "Evicted"
    assert get(plane, namespace, "flaky")["status"]["containerStatuses"][0]["restartCount"] == 2
    assert plane.kubectl("logs", "fine", namespace=namespace) == "done at fine\n"
    assert plane.kubectl("logs", "flaky", "--previous", namespace=namespace) == "turn 1\n"


def test_a_pod_has_the_rights_of_its_service_account_and_no_others(
    control_plane, cluster, namespace
):
    cluster.add("rights-0")
    create(control_plane, namespace, pod("asks", "-c", ASK))
    wait_phase(control_plane, namespace, "asks", "Succeeded")
    said = control_plane.kubectl("logs", "asks", namespace=namespace)
    assert said.startswith("403 ")
    assert f"system:serviceaccount:{namespace}:default" in said


def test_pods_of_two_nodes_reach_each_other_by_name_until_one_is_cut_off(
    control_plane, cluster, namespace
):
    plane = control_plane
    cluster.add("near")
    cluster.add("far")
    named = {"hostname": "one", "subdomain": "group", "labels": {"in": "group"}}
    create(
        plane, namespace,
        headless("group", {"in": "group"}),
        pod("serves", "-c", SERVE, nodeSelector={"kubernetes.io/hostname": "far"}, **named),
        pod("calls", "-c", CALL, nodeSelector={"kubernetes.io/hostname": "near"}),
    )  # fmt: skip
    wait_log(plane, namespace, "calls", "hears one")
    before = cluster["far"].tell("pids", namespace=namespace, pod="serves")
    cluster["far"].cut_off()
    wait_log(plane, namespace, "calls", "hears one\ndeaf")
    node = "/api/v1/nodes/far"
    plane.wait("far is lost", lambda: _ready(plane.ask("GET", node)) == "Unknown")
    # Pods behind a partition continue, and no other node reaches them.
    assert cluster["far"].tell("pids", namespace=namespace, pod="serves") == before
    cluster["far"].heal()
    wait_log(plane, namespace, "calls", "deaf\nhears one")
    plane.wait("far is back", lambda: _ready(plane.ask("GET", node)) == "True")


def _ready(node):
    (told,) = [each for each in node["status"]["conditions"] if each["type"] == "Ready"]
    return told["status"]


def test_a_deleted_pod_has_its_time_of_grace_and_no_more(control_plane, cluster, namespace):
    cluster.add("grace-0")
    create(
        control_plane, namespace,
        pod("polite", "-c", POLITE, terminationGracePeriodSeconds=60),
        pod("stubborn", "-c", STUBBORN, terminationGracePeriodSeconds=1),
    )  # fmt: skip
    for name in ("polite", "stubborn"):
        wait_log(control_plane, namespace, name, "up")
    log = next(cluster.folder.glob(f"grace-0/{namespace}.polite.*/c.0.log"))
    control_plane.kubectl("delete", "pod", "polite", "stubborn", namespace=namespace)
    assert "saved" in log.read_text()


def test_a_missing_image_is_reported_until_it_can_be_pulled(control_plane, cluster, namespace):
    node = cluster.add("images-0")
    create(control_plane, namespace, pod("waits", "-c", "print('at last')", image="new:1"))
    # ErrImagePull comes before it, for too short a time to be seen for certain.
    wait_pod(
        control_plane, namespace, "waits",
        lambda got: state(got).get("waiting", {}).get("reason") == "ImagePullBackOff",
    )  # fmt: skip
    image = cluster.images["python"]
    node.tell("image", name="new:1", image={"entrypoint": image.entrypoint})
    wait_phase(control_plane, namespace, "waits", "Succeeded")


def test_a_node_that_dies_takes_its_pods_along_and_starts_them_when_it_is_back(
    control_plane, cluster, namespace
):
    plane = control_plane
    node = cluster.add("dies-0")
    create(plane, namespace, pod("kept", "-c", FOREVER, restartPolicy="Always"))
    create(plane, namespace, pod("once", "-c", FOREVER))
    pids = []
    for name in ("kept", "once"):
        wait_log(plane, namespace, name, "up")
        pids += cluster.tell(namespace, name, "pids").values()
    node.die()
    deadline_s = time.monotonic() + 30
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    node.start()
    assert state(wait_phase(plane, namespace, "once", "Failed"))["terminated"]["exitCode"] == 137
    wait_pod(plane, namespace, "kept", _has_started_again)


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _has_started_again(got):
    (told,) = got["status"]["containerStatuses"]
    return told["restartCount"] == 1 and "running" in told["state"]


SEEN = """
import json, os, shutil
def read(path):
    return open(path).read()
print(json.dumps({
    "config": read("/cfg/a.txt"), "secret": read("/sec/key"), "label": read("/down/label"),
    "host": read("/machine/here"), "shm": os.statvfs("/dev/shm").f_blocks * 4096,
    "env": [os.environ.get(name) for name in ("A", "S", "ALL_key", "UID", "MIX", "CPUS")],
    "tmp": os.listdir("/tmp"), "name": os.uname().nodename, "pid": os.getpid(),
}))
"""


def test_a_container_sees_its_volumes_and_variables_and_leaves_no_trace(
    control_plane, cluster, namespace, tmp_path
):
    cluster.add("volumes-0", capacity={"nvidia.com/gpu": "8"})
    (tmp_path / "here").write_text("of the machine")
    meta = {"name": "given"}
    data = {"a.txt": "from config", "A": "x"}
    create(
        control_plane, namespace,
        {"kind": "ConfigMap", "apiVersion": "v1", "metadata": meta, "data": data},
        {"kind": "Secret", "apiVersion": "v1", "metadata": meta, "stringData": {"key": "hush"}},
    )  # fmt: skip
    volumes = [
        {"name": "cfg", "configMap": {"name": "given"}},
        {"name": "sec", "secret": {"secretName": "given"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "96Mi"}},
        {"name": "machine", "hostPath": {"path": str(tmp_path)}},
        {"name": "down", "downwardAPI": {"items": [_down("label", "metadata.labels['app']")]}},
    ]
    mounts = {
        "cfg": "/cfg",
        "sec": "/sec",
        "shm": "/dev/shm",
        "machine": "/machine",
        "down": "/down",
    }
    env = [
        {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "given", "key": "A"}}},
        {"name": "S", "valueFrom": {"secretKeyRef": {"name": "given", "key": "key"}}},
        {"name": "UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "MIX", "value": "$(A)-$(NOBODY)-$$(A)"},
        {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
    ]
    container = {
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
        "env": env,
        "envFrom": [{"secretRef": {"name": "given"}, "prefix": "ALL_"}],
        "resources": {"limits": {"nvidia.com/gpu": 2, "cpu": "1500m"}},
    }
    create(control_plane, namespace, pod("sees", "-c", SEEN, container=container, volumes=volumes))
    got = wait_phase(control_plane, namespace, "sees", "Succeeded", "Failed")
    said = control_plane.kubectl("logs", "sees", namespace=namespace)
    uid = got["metadata"]["uid"]
    found = json.loads(said)
    # The environment that the tests run in is to be seen, wherever it lies.
    found["tmp"] = [name for name in found["tmp"] if not sys.prefix.startswith(f"/tmp/{name}")]
    assert found == {
        "config": "from config", "secret": "hush", "label": "sees", "host": "of the machine",
        "shm": 96 << 20, "env": ["x", "hush", "hush", uid, "x-$(NOBODY)-$(A)", "2"],
        "tmp": [], "name": "sees", "pid": 1,
    }  # fmt: skip
    for path in ("/cfg", "/sec", "/machine", "/down"):
        assert not os.path.exists(path)


def _down(path, field):
    return {"path": path, "fieldRef": {"fieldPath": field}}


def test_a_pod_of_more_weight_takes_the_place_of_another(control_plane, cluster, namespace):
    cluster.add("weights-0", capacity={"nvidia.com/gpu": "1"})
    weight = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    control_plane.ask("POST", path, weight | {"metadata": {"name": f"heavy-{namespace}"}})
    one = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    brief = {"terminationGracePeriodSeconds": 5, "container": one}
    create(control_plane, namespace, pod("light", "-c", POLITE, **brief))
    wait_log(control_plane, namespace, "light", "up")
    heavy = pod("heavy", "-c", FOREVER, priorityClassName=f"heavy-{namespace}", **brief)
    create(control_plane, namespace, heavy)
    wait_log(control_plane, namespace, "heavy", "up")
    with pytest.raises(AssertionError, match="404"):
        get(control_plane, namespace, "light")


def test_a_control_plane_keeps_what_it_had_when_its_parts_are_killed():
    with ControlPlane(whole=False) as plane:
        namespace = plane.namespace()
        for name in ("kube-apiserver", "etcd"):
            plane[name].kill()
        plane.start_part("etcd")
        plane.start_part("kube-apiserver")
        assert namespace in plane.kubectl("get", "namespaces", "-o", "name")
        folder = plane.folder
    assert not folder.exists()


# Nothing is tried as root that would write on the machine where this bed is at fault.
LOCKED = """
import os
said = [f"user {os.getuid()}"]
paths = ["/here", "/etc/here", "/usr/here"] if os.getuid() else ["/here"]
for path in [*paths, "/tmp/here"]:
    try:
        open(path, "w").close()
        said.append(f"{path} written")
    except OSError as error:
        said.append(f"{path} {error.strerror}")
print("; ".join(said))
"""


def test_a_container_of_user_nobody_without_a_writable_folder_is_held_to_it(
    control_plane, cluster, namespace
):
    cluster.add("locked-0")
    for name, context in (
        ("nobody", {"runAsUser": 65532, "readOnlyRootFilesystem": True}),
        ("locked", {"readOnlyRootFilesystem": True}),
    ):
        container = {"securityContext": context}
        create(control_plane, namespace, pod(name, "-c", LOCKED, container=container))
        wait_phase(control_plane, namespace, name, "Succeeded", "Failed")
    denied = "; ".join(f"/{path}/here Permission denied" for path in ("etc", "usr"))
    said = control_plane.kubectl("logs", "nobody", namespace=namespace)
    assert said == f"user 65532; /here Read-only file system; {denied}; /tmp/here written\n"
    said = control_plane.kubectl("logs", "locked", namespace=namespace)
    assert "user 0; /here Read-only file system" in said and "/tmp/here written" in said
