"""The cluster and namespace that a command line names, and the owner of new objects.

Owns the variables of an ElasticJob's pods, and how `--rdzv-endpoint` and `--rdzv-conf` are read. It
opens no file and no connection before `access`. It fails with ConfigurationError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastane.errors import ConfigurationError

if TYPE_CHECKING:
    from elastane.kubernetes.client import ClusterAccess

# Set in the pods of an ElasticJob by its operator.
JOB_VARIABLE = "ELASTANE_ELASTICJOB"
POD_VARIABLE = "ELASTANE_POD_UID"


@dataclass(frozen=True)
class KubernetesSettings:
    """Where the objects are. Empty fields come from the service account or the kubeconfig."""

    namespace: str = ""
    kubeconfig: str = ""
    context: str = ""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def elastic_job(self) -> str:
        """The ElasticJob of this pod, "" outside of one."""
        # In workers a variable of this name has another meaning: the name of the run.
        return self.environ.get(JOB_VARIABLE, "") if self.pod else ""

    @property
    def pod(self) -> str:
        """The uid of this pod, "" outside of one."""
        return self.environ.get(POD_VARIABLE, "")

    def access(self) -> ClusterAccess:
        """Find the API server, reading small files; ConfigurationError if there is none."""
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
