"""Which API server, in which namespace, as whom: in a pod by its service account, or a kubeconfig.

Owns the search (argument, then KUBECONFIG, then the pod's own service account, then
~/.kube/config), and the identity that each request carries: a token or certificate that is read
anew when its file changes, or when the server says that it does not know it. How it fails:
ConfigurationError that says what was looked for, and where.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from elastane.errors import ConfigurationError
from elastane.kubernetes.client.identity import ClientProof, Identity, ServiceToken

if TYPE_CHECKING:
    import ssl

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """How the server proves who it is. `ca` is PEM text, or `ca_file` is read at each connect."""

    ca: str = ""
    ca_file: str = ""
    insecure: bool = False
    server_name: str = ""


class ClusterAccess:
    """One server and one identity. `where` tells a person which; `namespace` is the default one."""

    def __init__(
        self, server: str, identity: Identity, *, namespace: str, where: str, tls: Tls | None = None
    ) -> None:
        self.server = server
        self.identity = identity
        self.namespace = namespace
        self.where = where
        self.tls = tls or Tls()
        self.proxy = ""

    async def proof(self) -> ClientProof:
        """Return who we are, read anew where that has changed."""
        return await self.identity.proof()

    def renew(self) -> bool:
        """Forget what is known of who we are; False where it would be the same again."""
        return self.identity.renew()

    def extensions(self) -> dict[str, str]:
        """Return what the connection is told beside the address."""
        return {"sni_hostname": self.tls.server_name} if self.tls.server_name else {}

    def context(self, proof: ClientProof) -> ssl.SSLContext | bool:
        """Return the TLS of a new connection; ConfigurationError for unusable certificates."""
        from elastane.kubernetes.client.identity import load_certificate

        if not self.server.startswith("https:"):
            return False
        import ssl

        try:
            context = ssl.create_default_context(
                cafile=self.tls.ca_file or None, cadata=self.tls.ca or None
            )
            if self.tls.insecure:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if proof.certificate:
                load_certificate(context, proof)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigurationError(
                f"kubernetes: the certificates cannot be used: {error}",
                slug="kube-tls",
                where=self.where,
                expected="PEM certificates and a key that belong together",
            ) from error
        return context


def find_access(
    environ: Mapping[str, str],
    *,
    kubeconfig: str = "",
    context: str = "",
    namespace: str = "",
    service_account: Path = SERVICE_ACCOUNT,
) -> ClusterAccess:
    """Find the server: `kubeconfig` or `context` where given, else as kubectl in a pod would.

    `namespace` goes before that of the context or the service account. Reads small files.
    """
    from elastane.kubernetes.client.kubeconfig import read_kubeconfig

    home = Path(environ.get("HOME") or "/nonexistent") / ".kube" / "config"
    if kubeconfig or environ.get("KUBECONFIG"):
        access = read_kubeconfig(kubeconfig or environ["KUBECONFIG"], environ, context)
    elif not context and environ.get("KUBERNETES_SERVICE_HOST"):
        access = in_cluster(environ, service_account)
    elif home.exists():
        access = read_kubeconfig(str(home), environ, context)
    else:
        raise ConfigurationError(
            "kubernetes: this is no pod, and there is no kubeconfig",
            slug="kube-no-cluster",
            where=f"KUBERNETES_SERVICE_HOST and KUBECONFIG are not set, {home} does not exist",
            expected="a pod with a service account, or a kubeconfig",
            next_step="export KUBECONFIG=PATH, or --kubeconfig PATH; of elastane run it is"
            " --rdzv-conf kubeconfig=PATH",
        )
    if namespace:
        access.namespace = namespace
    return access


def in_cluster(environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> ClusterAccess:
    """Return the access of a pod's service account; ConfigurationError where it has none."""
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT_HTTPS") or environ.get("KUBERNETES_SERVICE_PORT")
    token = folder / "token"
    if not token.exists():
        raise ConfigurationError(
            f"kubernetes: this pod has no service account token: {token} does not exist",
            slug="kube-no-token",
            expected="a pod whose service account's token is mounted",
            next_step="automountServiceAccountToken: true in the pod, and serviceAccountName of "
            "an account that may do what is needed",
        )
    try:
        namespace = (folder / "namespace").read_text().strip()
    except OSError:
        namespace = ""
    address = f"[{host}]" if ":" in host else host
    return ClusterAccess(
        f"https://{address}:{port or 443}",
        ServiceToken(token),
        namespace=namespace or "default",
        where=f"service account of this pod, server {host}",
        tls=Tls(ca_file=str(folder / "ca.crt")),
    )
