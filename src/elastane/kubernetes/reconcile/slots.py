"""The indices that should have pods.

Index slices, as in the original: 0 to replicas - 1, so the highest leave first. With PendingFirst
pods that do not run yet leave before those that do, so the indices may have gaps.
"""

from __future__ import annotations

from elastane.kubernetes.reconcile.context import DecisionContext
from elastane.kubernetes.reconcile.injection import backend


def wanted_slots(context: DecisionContext) -> list[int]:
    """Return the indices, in ascending order."""
    settings = context.settings
    if settings.spec.scale_down_policy == "HighestIndex":
        return list(range(settings.desired))
    places: dict[int, int] = dict.fromkeys(
        (index for index, trouble in context.troubles.items() if trouble.waiting), 1
    )
    for pod in context.own:
        if not pod.is_leaving and pod.whose in ("ours", "orphan"):
            place = 1 if pod.state == "pending" else 0
            places[pod.index] = min(place, places.get(pod.index, 1))
    if backend(context.job, settings) == "c10d" and 0 in places:
        places[0] = -1  # It holds the store: without it the others lose their world.
    kept = sorted(places, key=lambda index: (places[index], index))[: settings.desired]
    free = 0
    while len(kept) < settings.desired:
        if free not in kept:
            kept.append(free)
        free += 1
    return sorted(kept)
