"""The manifests that the field's documentation showed for TorchElastic in 2020 apply as they are.

Changed are the image, and volumes that put the script and the images where that image had them.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bed.setting import Image
from etcd_server import ETCD
from jobs import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "imagenet"
ETCD_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "etcd", "labels": {"app": "etcd"}},
    "spec": {
        "restartPolicy": "Always",
        "containers": [
            {
                "name": "etcd",
                "image": "etcd",
                "args": [
                    *("--data-dir", "/var/lib/etcd", "--enable-v2"),
                    *("--listen-client-urls", "http://0.0.0.0:2379"),
                    *("--advertise-client-urls", "http://0.0.0.0:2379"),
                    *("--initial-cluster-state", "new"),
                ],
                "volumeMounts": [{"name": "data", "mountPath": "/var/lib/etcd"}],
            }
        ],
        "volumes": [{"name": "data", "emptyDir": {}}],
    },
}
ETCD_SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "etcd-service"},
    "spec": {"selector": {"app": "etcd"}, "ports": [{"name": "etcd-client-port", "port": 2379}]},
}
WORKSPACE = {"script": "/workspace/examples/imagenet", "data": "/workspace/data/tiny-imagenet-200"}


def imagenet(name, folder):
    volumes = [{"name": n, "hostPath": {"path": str(folder / n)}} for n in WORKSPACE]
    mounts = [{"name": n, "mountPath": path} for n, path in WORKSPACE.items()]
    container = {
        "name": "elasticjob-worker",
        "image": "torchelastic/examples:0.2.0",
        "imagePullPolicy": "Always",
        "args": [
            "--nproc_per_node=1",
            "/workspace/examples/imagenet/main.py",
            "--arch=resnet18",
            "--epochs=20",
            "--batch-size=32",
            "--workers=0",
            "/workspace/data/tiny-imagenet-200",
        ],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "volumeMounts": mounts,
    }
    template = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {"containers": [container], "volumes": volumes},
    }
    worker = {"replicas": 2, "restartPolicy": "ExitCode", "template": template}
    return {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {
            "rdzvEndpoint": "etcd-service:2379",
            "minReplicas": 1,
            "maxReplicas": 2,
            "replicaSpecs": {"Worker": worker},
        },
    }


@pytest.mark.soak
def test_imagenet_of_2020_trains_to_its_end_twice_at_once_with_one_etcd(
    cluster, operator, make_job, tmp_path
):
    folder = tmp_path / "workspace"
    (folder / "script").mkdir(parents=True)
    shutil.copy(EXAMPLE / "train_plain.py", folder / "script" / "main.py")
    shutil.copy(EXAMPLE / "common.py", folder / "script")
    make = [sys.executable, EXAMPLE / "make_images.py", folder / "data"]
    subprocess.run(
        [*make, "--classes", "2", "--train", "6", "--val", "2", "--size", "16"], check=True
    )
    launcher = [sys.executable, "-m", "elastane", "run"]
    cluster.images["torchelastic/examples:0.2.0"] = Image(launcher, {"OMP_NUM_THREADS": "1"})
    cluster.images["etcd"] = Image([ETCD])
    for name in ("a", "b"):
        cluster.add(name, capacity={"nvidia.com/gpu": "2"})
    jobs = [make_job(name) for name in ("imagenet", "imagenet-2")]
    for made in (ETCD_POD, ETCD_SERVICE):
        jobs[0].kubectl("apply", "-f", "-", given=json.dumps(made))
    for job in jobs:
        job.kubectl("apply", "-f", "-", given=json.dumps(imagenet(job.name, folder)))
    for job in jobs:
        job.wait_pods("both run", lambda pods: len(pods) == 2)
        assert sorted(job.pods()) == [f"{job.name}-worker-{index}" for index in (0, 1)]
    for job in jobs:
        until(lambda job=job: job.condition("Succeeded").get("status") == "True", "it ends", 600)
