"""torchmetrics under `elastane run --in-place`: a metric is over one membership.

A metric gathers its states one after the other. A change of the world between two of them would
divide the correct samples of four workers by all samples of three.
"""

from __future__ import annotations

import importlib
from typing import Any

from elastane.integrations.versions import require_known
from elastane.synchrony.visible import VisibleWorld

# The versions whose private names these are.
KNOWN = ("1.",)


def adopt(name: str, world: VisibleWorld) -> None:
    """Synchronise the states of each metric over one membership; `name`: the imported package.

    Raises ConfigurationError if the version is not known.
    """
    package: Any = importlib.import_module(name)
    require_known(name, str(package.__version__), KNOWN)
    metric = package.Metric
    gather = metric._sync_dist

    def sync_dist(self: Any, *args: Any, **kwargs: Any) -> None:
        own = {state: getattr(self, state) for state in self._reductions}

        def restore() -> None:
            for state, value in own.items():
                setattr(self, state, value)

        world.whole(lambda: gather(self, *args, **kwargs), restore)

    metric._sync_dist = sync_dist
