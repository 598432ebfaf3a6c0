"""PyTorch-Ignite under `elastane run --in-place`: a metric is over one membership.

A metric sums its states one after the other, floats and counts. A change of the world between two
of them would divide the correct samples of four workers by all samples of three.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from elastane.integrations.versions import require_known
from elastane.synchrony.visible import VisibleWorld

# The versions whose private names these are; `synchrony.callsites` knows two of their functions.
KNOWN = ("0.5.", "0.6.")


def adopt(name: str, world: VisibleWorld) -> None:
    """Compute each metric over one membership; `name`: the module with the metrics.

    Raises ConfigurationError if the version is not known.
    """
    package: Any = importlib.import_module(name.partition(".")[0])
    require_known(package.__name__, str(package.__version__), KNOWN)
    for kind in _kinds(importlib.import_module(name).Metric):
        compute = vars(kind).get("compute")
        # Other metrics use no collective, so a script may call them on one worker alone.
        if "idist" in getattr(getattr(compute, "__code__", None), "co_names", ()):
            _compute_whole(kind, world)


def _compute_whole(kind: Any, world: VisibleWorld) -> None:
    """Compute a metric over one membership, each time from what it has collected."""
    compute: Callable[[Any], Any] = kind.compute

    @functools.wraps(compute)
    def compute_whole(self: Any) -> Any:
        own = dict(vars(self))

        def restore() -> None:
            # A metric of whole epochs keeps its result.
            vars(self).clear()
            vars(self).update(own)

        return world.whole(lambda: compute(self), restore)

    kind.compute = compute_whole


def _kinds(kind: type) -> set[type]:
    """Return a class and all that are derived from it."""
    return {kind}.union(*map(_kinds, kind.__subclasses__()))
