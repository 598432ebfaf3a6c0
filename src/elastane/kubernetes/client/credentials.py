"""Finds the API server, the namespace and the identity, in a pod or through a kubeconfig.

Owns the search: argument, then KUBECONFIG, then the pod's own service account, then
~/.kube/config. Owns the reading of kubeconfig files, too. Of several files, the first one that
defines a name wins. Paths are relative to their file. A user is given by certificates, a token or a
plugin. It fails with ConfigurationError that names the missing thing, the file and the field.
"""

from __future__ import annotations

import base64
import binascii
import ssl
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from elastane.errors import ConfigurationError, missing_extra
from elastane.kubernetes.client.identity import (
    ClientProof,
    FileIdentity,
    FixedIdentity,
    Identity,
    Plugin,
    PluginIdentity,
    ServiceToken,
    header_safe,
    load_certificate,
)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate authorities that the server's certificate must come from.

    `ca` is PEM text, or `ca_file` is read at each connect.
    """

    ca: str = ""
    ca_file: str = ""
    insecure: bool = False
    server_name: str = ""


_DEFAULT_TLS = Tls()


@dataclass(frozen=True)
class ClusterAccess:
    """One server, one identity and a default namespace; messages name it by `where`."""

    server: str
    identity: Identity
    _: KW_ONLY
    namespace: str
    where: str
    tls: Tls = _DEFAULT_TLS
    proxy: str = ""

    async def proof(self) -> ClientProof:
        """Return the current token or certificate; a changed file is read again."""
        return await self.identity.proof()

    def renew(self) -> bool:
        """Drop the current token or certificate; return False if the next would be the same."""
        return self.identity.renew()

    def extensions(self) -> dict[str, str]:
        """Return httpx's extension that names the host in the server's certificate, if given."""
        return {"sni_hostname": self.tls.server_name} if self.tls.server_name else {}

    def context(self, proof: ClientProof) -> ssl.SSLContext | bool:
        """Return the TLS of a new connection; ConfigurationError for unusable certificates."""
        if not self.server.startswith("https:"):
            return False
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
    """Find the server: by `kubeconfig` or `context` if given, otherwise as kubectl in a pod would.

    `namespace` overrides that of the context or the service account. Reads small files.
    """

    home = Path(environ.get("HOME") or "/nonexistent") / ".kube" / "config"
    if kubeconfig or environ.get("KUBECONFIG"):
        access = read_kubeconfig(kubeconfig or environ["KUBECONFIG"], environ, context)
    elif not context and environ.get("KUBERNETES_SERVICE_HOST"):
        access = in_cluster(environ, service_account)
    elif home.exists():
        access = read_kubeconfig(str(home), environ, context)
    else:
        raise ConfigurationError(
            "kubernetes: this process runs in no pod, and there is no kubeconfig",
            slug="kube-no-cluster",
            where=f"KUBERNETES_SERVICE_HOST and KUBECONFIG are not set, {home} does not exist",
            expected="a pod with a service account, or a kubeconfig",
            next_step="export KUBECONFIG=PATH, or --kubeconfig PATH; of elastane run it is"
            " --rdzv-conf kubeconfig=PATH",
        )
    return replace(access, namespace=namespace) if namespace else access


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


FILE_BYTES_MAX = 16 << 20


def read_kubeconfig(paths: str, environ: Mapping[str, str], context: str = "") -> ClusterAccess:
    """Return the access of a context (`context`, else the current one) of files joined by ':'."""
    files = [Path(part).expanduser() for part in paths.split(":") if part]
    found = [_File(path, _load(path)) for path in files if path.exists() or len(files) == 1]
    if not found:
        raise _wrong(paths, "none of these files exists", "a kubeconfig")
    context = context or next(
        (
            str(file.content["current-context"])
            for file in found
            if file.content.get("current-context")
        ),
        "",
    )
    if not context:
        raise _wrong(paths, "there is no current-context", "a context: --rdzv-conf context=NAME")
    meant = _named(found, "contexts", "context", context)
    cluster = _named(found, "clusters", "cluster", _text(meant.content, "cluster"))
    user = (
        _named(found, "users", "user", _text(meant.content, "user"))
        if meant.content.get("user")
        else None
    )
    server = _text(cluster.content, "server").rstrip("/")
    if not _is_url(server):
        raise _wrong(str(cluster.path), f"server {server!r}", "https://HOST:PORT")
    return ClusterAccess(
        server,
        _identity(user, cluster, environ) if user else FixedIdentity(),
        namespace=_text(meant.content, "namespace") or "default",
        where=f"kubeconfig {meant.path}, context {context}, server {server}",
        tls=_tls(cluster),
        proxy=_text(cluster.content, "proxy-url"),
    )


class _File:
    """A mapping of a kubeconfig, and the file that contains it."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self.content = content

    def relative(self, written: str) -> Path:
        """Return the absolute path; a relative one begins at the file's folder."""
        return self.path.parent / Path(written).expanduser()

    def pem(self, field: str) -> str:
        """Return the content of `<field>-data`; "" if it is absent."""
        written = _text(self.content, f"{field}-data")
        try:
            return base64.b64decode(written, validate=True).decode()
        except (binascii.Error, ValueError) as error:
            raise _wrong(str(self.path), f"{field}-data: {error}", "base64 of PEM") from error


def _load(path: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise missing_extra(
            "a kubeconfig needs the package PyYAML, which is not installed", "kubernetes"
        ) from None
    try:
        with path.open("rb") as file:
            content = yaml.safe_load(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise _wrong(str(path), str(error), "a kubeconfig that this user can read") from error
    if content is not None and not isinstance(content, dict):
        raise _wrong(str(path), "it is no mapping", "a kubeconfig")
    return content or {}


def _named(files: list[_File], plural: str, single: str, name: str) -> _File:
    """Return the entry of that name of the first file that has it."""
    names: list[str] = []
    for file in files:
        entries = file.content.get(plural) or []
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get(single) or {}, dict):
                names.append(str(entry.get("name")))
                if names[-1] == name:
                    return _File(file.path, entry.get(single) or {})
    raise _wrong(
        ":".join(str(file.path) for file in files),
        f"no {single} {name!r}",
        f"one of {', '.join(names) or 'none: there are no ' + plural}",
    )


def _tls(cluster: _File) -> Tls:
    written = _text(cluster.content, "certificate-authority")
    ca = cluster.pem("certificate-authority")
    return Tls(
        ca=ca,
        ca_file=str(cluster.relative(written)) if written and not ca else "",
        insecure=bool(cluster.content.get("insecure-skip-tls-verify")),
        server_name=_text(cluster.content, "tls-server-name"),
    )


def _identity(user: _File, cluster: _File, environ: Mapping[str, str]) -> Identity:
    if user.content.get("exec"):
        return PluginIdentity(_plugin(user, cluster, environ))
    if user.content.get("auth-provider"):
        raise _wrong(
            str(user.path),
            "a user with auth-provider, which Kubernetes gave up in 1.26",
            "a user with exec, a token or a certificate; log in again with the cloud's own tool",
        )
    token, name = _text(user.content, "token"), _text(user.content, "username")
    authorization = ""
    if token:
        try:
            authorization = f"Bearer {header_safe(token)}"
        except ValueError as error:
            raise _wrong(str(user.path), str(error), "a token") from error
    elif name:
        pair = f"{name}:{_text(user.content, 'password')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    fixed = ClientProof(authorization, user.pem("client-certificate"), user.pem("client-key"))
    paths = {}
    for part, field, inline in (
        ("token", "tokenFile", fixed.authorization),
        ("certificate", "client-certificate", fixed.certificate),
        ("key", "client-key", fixed.key),
    ):
        if _text(user.content, field) and not inline:
            paths[part] = user.relative(_text(user.content, field))
    return FileIdentity(paths, fixed) if paths else FixedIdentity(fixed)


def _plugin(user: _File, cluster: _File, environ: Mapping[str, str]) -> Plugin:
    spec = user.content["exec"]
    if not isinstance(spec, dict) or not _text(spec, "command"):
        raise _wrong(str(user.path), "exec without a command", "the command of a credential plugin")
    if spec.get("interactiveMode") == "Always":
        raise _wrong(str(user.path), "exec that needs a terminal", "interactiveMode: IfAvailable")
    command = _text(spec, "command")
    pairs = [pair for pair in spec.get("env") or [] if isinstance(pair, dict)]
    described = {
        "server": _text(cluster.content, "server"),
        "certificate-authority-data": _text(cluster.content, "certificate-authority-data"),
        "insecure-skip-tls-verify": bool(cluster.content.get("insecure-skip-tls-verify")),
    }
    return Plugin(
        command=str(user.relative(command)) if "/" in command else command,
        args=tuple(str(arg) for arg in spec.get("args") or []),
        environ={**environ, **{_text(pair, "name"): _text(pair, "value") for pair in pairs}},
        api_version=_text(spec, "apiVersion") or "client.authentication.k8s.io/v1",
        cluster=described if spec.get("provideClusterInfo") else None,
        hint=_text(spec, "installHint"),
    )


def _is_url(server: str) -> bool:
    try:
        parts = urlsplit(server)
        is_server = parts.port != 0 and bool(parts.hostname)
    except ValueError:
        return False
    return is_server and parts.scheme in ("https", "http") and server.isascii()


def _text(mapping: Mapping[str, Any], field: str) -> str:
    value = mapping.get(field)
    return "" if value is None else str(value)


def _wrong(path: str, what: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"kubeconfig {path}: {what}",
        slug="kube-config",
        expected=expected,
        next_step=f"kubectl config view --kubeconfig {path}",
    )
