"""Which cluster and namespace a command line names, and the owner of new objects.

Owns the keys of `--rdzv-conf` that concern Kubernetes, and the backend. It opens no file and no
connection before `access`. It fails with ConfigurationError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from elastane.errors import ConfigurationError
from elastane.process.environment import snapshot
from elastane.protocol.limits import Timing
from elastane.stores import ConfKey, Store, StoreBackend, StorePlace

if TYPE_CHECKING:
    from elastane.kubernetes.client import ClusterAccess

# Set in the pods of an ElasticJob by its operator.
JOB_VARIABLE = "ELASTANE_ELASTICJOB"
POD_VARIABLE = "ELASTANE_POD_UID"
# All jobs share the cluster's API server: one write a second for each job, not two. kubelets renew
# theirs every 10 s, and there are at most some thousands of either.
TIMING = msgspec.structs.replace(Timing(), lease_ttl_s=3.0, lease_renew_s=1.0)


@dataclass(frozen=True)
class KubernetesSettings:
    """The place of the objects. Empty fields: those of the service account or the kubeconfig."""

    namespace: str = ""
    kubeconfig: str = ""
    context: str = ""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def elastic_job(self) -> str:
        """The ElasticJob of this pod, "" outside of one."""
        # Workers have a variable of that name as well, with the name of the run.
        return self.environ.get(JOB_VARIABLE, "") if self.pod else ""

    @property
    def pod(self) -> str:
        """The uid of this pod, "" outside of one."""
        return self.environ.get(POD_VARIABLE, "")

    def access(self) -> ClusterAccess:
        """Find the API server, reading small files; ConfigurationError where there is none."""
        from elastane.kubernetes.client import find_access

        return find_access(
            self.environ,
            kubeconfig=self.kubeconfig,
            context=self.context,
            namespace=self.namespace,
        )


def read_settings(
    endpoint: str, conf: Mapping[str, str], environ: Mapping[str, str]
) -> KubernetesSettings:
    """Read `--rdzv-endpoint`, which is a namespace or empty, and the pairs of `--rdzv-conf`."""
    named = conf.get("namespace", "")
    if named and endpoint and named != endpoint:
        raise ConfigurationError(
            f"--rdzv-endpoint {endpoint} and --rdzv-conf namespace={named} name two namespaces",
            slug="bad-rdzv-conf",
            expected="one of them",
        )
    return KubernetesSettings(
        namespace=endpoint or named,
        kubeconfig=conf.get("kubeconfig", ""),
        context=conf.get("context", ""),
        environ=environ,
    )


def _check(place: StorePlace, environ: Mapping[str, str]) -> StorePlace:
    """Find the namespace; ConfigurationError where no cluster can be asked."""
    namespace = read_settings(place.endpoint, place.conf, environ).access().namespace
    return StorePlace(
        namespace, {key: value for key, value in place.conf.items() if key != "namespace"}
    )


def _make(place: StorePlace) -> Store:
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
        ConfKey("kubeconfig", "where the API server is, and who we are to it", unit="file"),
        ConfKey("context", "a context of the kubeconfig"),
        ConfKey("namespace", "where the job's objects are"),
    ),
    tls=True,
    login=True,
    timing=TIMING,
    forgets=False,
    late_s=1.5,  # a Lease's duration is whole seconds
)
