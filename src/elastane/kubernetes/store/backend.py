"""The backend `--rdzv-backend kubernetes`: its options, its timing, and how the store is made.

Importing this module is cheap: the store and the client are imported when a job uses them. It fails
with ConfigurationError where no cluster can be found.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from elastane.kubernetes.store.settings import read_settings
from elastane.process.environment import snapshot
from elastane.protocol.limits import Timing
from elastane.stores import ConfKey, Store, StoreBackend, StorePlace

# All jobs share the cluster's API server, so each renews its lease once a second. (Kubelets renew
# theirs every 10 s; a cluster has at most some thousands of either.)
TIMING = msgspec.structs.replace(Timing(), lease_ttl_s=3.0, lease_renew_s=1.0)


def _check(place: StorePlace, environ: Mapping[str, str]) -> StorePlace:
    """Find the namespace; ConfigurationError where no cluster can be asked."""
    namespace = read_settings(place.endpoint, place.conf, environ).access().namespace
    return StorePlace(
        namespace, {key: value for key, value in place.conf.items() if key != "namespace"}
    )


def _make(place: StorePlace) -> Store:
    # Only a job that uses this store pays for the imports of a client.
    from elastane.kubernetes.store.store import KubernetesStore

    return KubernetesStore(read_settings(place.endpoint, place.conf, snapshot()))


BACKEND = StoreBackend(
    name="kubernetes",
    make=_make,
    endpoint="a namespace of the cluster, or nothing for that of the pod or the kubeconfig",
    example="training",
    needs_endpoint=False,
    check=_check,
    keys=(
        ConfKey(
            "kubeconfig", "the file with the API server's address and the credentials", unit="file"
        ),
        ConfKey("context", "a context of the kubeconfig"),
        ConfKey("namespace", "the namespace of the job's objects"),
    ),
    tls=True,
    login=True,
    timing=TIMING,
    forgets=False,
    late_s=1.5,  # a Lease's duration is whole seconds
)
