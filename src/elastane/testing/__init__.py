"""For tests: jobs of several nodes on this one machine, under faults.

    from elastane.testing import Fault, FaultPlan, LocalCluster

`LocalCluster` runs a training script on several nodes of this machine, `FaultPlan` injects faults
by plan, and pytest gets the fixture `local_cluster`. See docs/testing.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastane.testing.cluster import ClusterError, ClusterWorld, LocalCluster, LocalNode
    from elastane.testing.plans import Fault, FaultPlan

__all__ = ["ClusterError", "ClusterWorld", "Fault", "FaultPlan", "LocalCluster", "LocalNode"]
_PLANS = ("Fault", "FaultPlan")


def __getattr__(name: str) -> Any:
    # pytest imports this package in every project, for its plug-in.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "plans" if name in _PLANS else "cluster"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
