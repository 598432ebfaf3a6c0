"""Everything that people apply is taken by a real API server: base, overlay, charts, samples."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from bed import binaries
from elastic_jobs import install_definition
from helm_subset import render_chart

from elastane.cli.kubernetes import NAMESPACE
from elastane.kubernetes.manifests import Installation, installation

ROOT = Path(__file__).parents[2]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
CHARTS = ROOT / "deploy" / "helm"
SAMPLES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
PLAIN = {"image": "train:1", "args": ["train.py"]}


def kustomized(folder):
    binaries.need(binaries.unavailable(()))
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUSTOMIZE / folder)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return by_name(yaml.safe_load_all(done.stdout))


def by_name(documents):
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def test_the_base_is_what_install_prints():
    base = kustomized("base")
    (operator,) = base["Deployment", "elastane-operator"]["spec"]["template"]["spec"]["containers"]
    assert operator["image"].startswith("set-an-image.invalid/"), "an overlay sets it"
    printed = installation(Installation(namespace=NAMESPACE, image=operator["image"]))
    assert base == by_name(printed)


def test_the_overlay_changes_what_it_says_and_nothing_else():
    base, over = kustomized("base"), kustomized("overlays/example")
    key = ("Deployment", "elastane-operator")
    changed, whole = over.pop(key)["spec"], base.pop(key)["spec"]
    assert over == base
    (one,), (other,) = (spec["template"]["spec"]["containers"] for spec in (changed, whole))
    assert changed["replicas"] == 2
    assert one["image"] == "registry.example/elastane:0.1.0"
    assert one["args"] == [*other["args"], "--json-logs"]
    assert one["resources"]["limits"] == {"memory": "1Gi"}


def holds(sent, got):
    """Whether all that was sent came back."""
    if isinstance(sent, dict):
        return isinstance(got, dict) and all(holds(sent[key], got.get(key)) for key in sent)
    if isinstance(sent, list):
        return len(sent) == len(got) and all(map(holds, sent, got))
    # A quantity comes back as it is spelt best.
    return sent == got or str(sent) == str(got)


def taken(plane, namespace, documents):
    """What the API server makes of documents, without keeping them."""
    given = yaml.safe_dump_all(documents)
    told = plane.kubectl(
        "apply", "--dry-run=server", "-o", "json", "-f", "-", given=given, namespace=namespace
    )
    made = json.loads(told)
    return made["items"] if made["kind"] == "List" else [made]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_sample_is_taken_and_nothing_of_it_is_pruned(control_plane, namespace, path):
    install_definition(control_plane)
    sent = list(yaml.safe_load_all(path.read_text()))
    assert sent
    for one, got in zip(sent, taken(control_plane, namespace, sent), strict=True):
        assert one["kind"] == got["kind"]
        assert holds(one.get("spec", {}), got.get("spec", {})), got


@pytest.mark.parametrize("chart", ["elastane-operator", "elastic-job"])
def test_what_the_charts_make_is_taken(control_plane, namespace, chart):
    install_definition(control_plane)
    operator = {"watchNamespace": namespace, "image": {"repository": "registry.example/elastane"}}
    values = PLAIN if chart == "elastic-job" else operator
    sent = render_chart(CHARTS / chart, "release", namespace, values)
    got = taken(control_plane, "", sent)
    assert [one["metadata"]["name"] for one in got] == [one["metadata"]["name"] for one in sent]


def test_the_definition_is_published_and_explains_itself(control_plane, namespace):
    install_definition(control_plane)
    given = next(path for path in SAMPLES if path.stem == "spot").read_text()
    control_plane.kubectl("apply", "--server-side", "-f", "-", given=given, namespace=namespace)
    told = control_plane.kubectl("explain", "elasticjobs.spec.exitCodeRules")
    assert "The first matching rule applies" in " ".join(told.split())
    for wrong in ({"codes": [True]}, {"codes": []}, {"codes": ["1"], "action": "Nothing"}):
        patch = json.dumps({"spec": {"exitCodeRules": [{"action": "Fail"} | wrong]}})
        with pytest.raises(AssertionError, match="exitCodeRules"):
            control_plane.kubectl(
                "patch", "ej/spot", "--type=merge", "-p", patch, namespace=namespace
            )
