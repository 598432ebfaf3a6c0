"""Pods for tests of the bed, made of a few words."""

from __future__ import annotations

import time
from typing import Any

from bed.controlplane import ControlPlane

DEADLINE_S = 90.0


def pod(name: str, *argv: str, image: str = "python", **spec: Any) -> dict[str, Any]:
    """A pod of one container `c`; what belongs to the container is given as `container`."""
    container = {"name": "c", "image": image, "args": list(argv), **spec.pop("container", {})}
    labels = spec.pop("labels", {"app": name})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"restartPolicy": "Never", "containers": [container], **spec},
    }


def create(plane: ControlPlane, namespace: str, *made: dict[str, Any]) -> None:
    for each in made:
        plane.ask("POST", f"/api/v1/namespaces/{namespace}/{each['kind'].lower()}s", each)


def get(plane: ControlPlane, namespace: str, name: str) -> dict[str, Any]:
    return plane.ask("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")


def state(got: dict[str, Any]) -> dict[str, Any]:
    """Of its only container: {"running": ...}, {"waiting": ...} or {"terminated": ...}."""
    return (got["status"].get("containerStatuses") or [{"state": {}}])[0]["state"]


def wait_phase(plane: ControlPlane, namespace: str, name: str, *phases: str) -> dict[str, Any]:
    return wait_pod(plane, namespace, name, lambda got: got["status"].get("phase") in phases)


def wait_pod(plane: ControlPlane, namespace: str, name: str, is_so: Any) -> dict[str, Any]:
    """Wait until what is said of the pod is so; AssertionError with the pod where it never is."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so(got := get(plane, namespace, name)):
        assert time.monotonic() < deadline_s, got["status"]
        time.sleep(0.05)
    return got


def wait_log(plane: ControlPlane, namespace: str, name: str, word: str) -> str:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            said = plane.kubectl("logs", name, namespace=namespace)
        except AssertionError as error:
            said = str(error)
        if word in said:
            return said
        assert time.monotonic() < deadline_s, f"{word!r} is not in the log of {name}: {said}"
        time.sleep(0.05)


def headless(name: str, selector: dict[str, str], early: bool = False) -> dict[str, Any]:
    """A Service without an address; `early` publishes addresses of pods that are not ready."""
    spec = {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": early}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
