"""Paths of the API: which kind, in which namespace, by which name; and selectors of lists.

Owns the checks that keep a name from becoming another path, and the kinds of Kubernetes itself that
elastane uses. How it fails: ConfigurationError for a name that no object can have.
"""

from __future__ import annotations

import re

import msgspec

from elastane.errors import ConfigurationError

# The longest name that API servers accept (RFC 1123 subdomain). RBAC names may contain colons.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?")


class Resource(msgspec.Struct, frozen=True):
    """A kind of object: `Resource("", "v1", "pods", "Pod")`; the core group is ""."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The apiVersion of its manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of an object, or of the collection where no name is given.

        Without a namespace and a name, the collection is that of all namespaces.
        """
        root = f"/apis/{self.group}" if self.group else "/api"
        parts = [root, self.version]
        if namespace and self.namespaced:
            parts += ["namespaces", _checked("namespace", namespace)]
        parts.append(self.plural)
        if name:
            parts.append(_checked(self.kind, name))
        if subresource:
            parts.append(subresource)
        return "/".join(parts)

    def label(self, namespace: str = "", name: str = "") -> str:
        """Return the object as a message names it: `pods/x in namespace y`."""
        what = f"{self.plural}/{name}" if name else self.plural
        return f"{what} in namespace {namespace}" if namespace else what


class Selector(msgspec.Struct, frozen=True):
    """The filter of a list or a watch, in Kubernetes' own syntax; empty: everything."""

    labels: str = ""
    fields: str = ""

    def query(self) -> dict[str, str]:
        """Return the filter as query parameters."""
        wanted = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {key: value for key, value in wanted.items() if value}


EVERYTHING = Selector()


def one(name: str) -> Selector:
    """Return the selector of the one object of that name."""
    return Selector(fields=f"metadata.name={name}")


def _checked(what: str, name: str) -> str:
    if not _NAME.fullmatch(name) or ".." in name:
        raise ConfigurationError(
            f"kubernetes: {what} {name[:80]!r} is not a valid name of an object",
            slug="kube-name",
            expected="letters, digits, '-' and '.', at most 253, a letter or digit at both ends",
        )
    return name


PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
EVENTS = Resource("", "v1", "events", "Event")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
