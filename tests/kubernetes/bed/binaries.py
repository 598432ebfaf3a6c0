"""Where the programs of a control plane are, or why there are none.

`KUBEBUILDER_ASSETS` first, as for envtest, then the folder that build.sh fills.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MINIMAL = ("etcd", "kube-apiserver")
WHOLE = (*MINIMAL, "kube-controller-manager", "kube-scheduler")


def folder() -> Path:
    if given := os.environ.get("KUBEBUILDER_ASSETS"):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "elastane-kubernetes" / "bin"


def unavailable(programs: tuple[str, ...] = WHOLE) -> str:
    """Why there can be no control plane here, or an empty string."""
    missing = [name for name in programs if not os.access(folder() / name, os.X_OK)]
    if missing:
        named = "KUBEBUILDER_ASSETS" in os.environ
        remedy = "unset KUBEBUILDER_ASSETS, or put them there" if named else "make kubernetes-bed"
        return f"missing in {folder()}: {' '.join(missing)}: {remedy}"
    if shutil.which("kubectl") is None:
        return "missing: kubectl: apt-get install kubernetes-client"
    return ""


@functools.cache
def version() -> tuple[int, int]:
    """Major and minor of the kube-apiserver that is there."""
    argv = [str(folder() / "kube-apiserver"), "--version"]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"v(\d+)\.(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])


def need(reason: str) -> None:
    """Skip loudly where there is a reason; a failure where `make kubernetes` requires it."""
    if reason:
        text = f"NOT RUN: tests against a real Kubernetes control plane: {reason}"
        required = os.environ.get("ELASTANE_KUBERNETES") == "required"
        (pytest.fail if required else pytest.skip)(text)
