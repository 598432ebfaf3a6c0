"""The control plane that all tests of one process share, for tests outside of tests/kubernetes too.

plane = shared_control_plane()
namespace = plane.namespace()
kubeconfig = plane.admin            # or plane.account("default", namespace)
"""

from __future__ import annotations

import atexit
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).parents[1] / "kubernetes"))

from bed import binaries
from bed.controlplane import ControlPlane

if TYPE_CHECKING:
    from bed.parts import Part

__all__ = ["ControlPlane", "Part", "need_control_plane", "shared_control_plane"]


def need_control_plane() -> None:
    """Skip loudly where there can be none; where everything is to be tested, that is a failure."""
    binaries.need(binaries.unavailable())


@functools.cache
def shared_control_plane() -> ControlPlane:
    """Whole, with controllers and scheduler; each test takes a namespace of its own."""
    need_control_plane()
    plane = ControlPlane().__enter__()
    atexit.register(plane.__exit__, None, None, None)
    return plane
