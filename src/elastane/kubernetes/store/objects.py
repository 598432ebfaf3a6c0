"""The ConfigMaps, Secrets and Leases of the store: which object holds which key, and its fields.

Owns the mapping of keys to names that the API server accepts. `run-1/record` is the ConfigMap
`elastane-run-1.record`; a key whose parts are not valid object names gets a digest, under another
prefix, so that no two keys share an object. Only the job's token is a Secret: an account that runs
workers then needs no right to read Secrets.

Owns the types of the objects, too. An answer of another type is rejected, and a field that a person
edited to an impossible value counts as absent. A version that is not a number is a StoreError.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from elastane.errors import StoreError
from elastane.kubernetes.client import Resource
from elastane.kubernetes.client.resource import CONFIGMAPS, SECRETS
from elastane.stores import TOKEN_PART, JobNames

# A label of RFC 1123. An object's name consists of such labels, joined by dots, and has at most 253
# characters.
_PART = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_NAME_CHARS_MAX = 253
_LABEL_CHARS_MAX = 63
_DIGEST_CHARS = 20
KEY_ANNOTATION = "elastane.dev/key"
JOB_LABEL = "elastane.dev/rdzv-id"
MANAGED_LABEL = "app.kubernetes.io/managed-by"


def object_name(key: str) -> str:
    """Return the name of the object that holds `key`, or that is the lease of that name."""
    parts = key.split("/")
    plain = "elastane-" + ".".join(parts)
    if len(plain) <= _NAME_CHARS_MAX and all(_PART.fullmatch(part) for part in parts):
        return plain
    readable = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")[:100].rstrip("-")
    return f"elastane.{_digest(key)}.{readable or 'key'}"


def resource_of(key: str) -> Resource:
    """Return the kind of object that holds `key`: a Secret for a job's token, else a ConfigMap."""
    return SECRETS if key.rpartition("/")[2] == TOKEN_PART else CONFIGMAPS


def job_label(key: str) -> str:
    """Return the value of JOB_LABEL on all objects whose key begins as this one does."""
    first = key.partition("/")[0]
    is_legal = re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", first)
    return first if is_legal and len(first) <= _LABEL_CHARS_MAX else _digest(first)


def labels_of(key: str) -> dict[str, str]:
    """Return the labels of the object of `key`."""
    return {MANAGED_LABEL: "elastane", JOB_LABEL: job_label(key)}


def token_of(job: str) -> str:
    """Return the name of the Secret that holds the token of a job (`--rdzv-id`)."""
    return object_name(JobNames(job).token_key)


def lease_of(job: str) -> str:
    """Return the name of the Lease by which a job elects its coordinator."""
    return object_name(JobNames(job).leadership)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]


TERM_ANNOTATION = "elastane.dev/term"
VALUE_ANNOTATION = "elastane.dev/value"
# The uid of the holder's pod: the operator knows whether that pod is dead.
POD_ANNOTATION = "elastane.dev/pod-uid"
# The longest duration that a candidate believes; the holder of a lease writes it.
TTL_S_MAX = 86_400


class StoredMeta(msgspec.Struct):
    """The metadata of an object that this store reads."""

    name: str = ""
    uid: str = ""
    resourceVersion: str = ""  # noqa: N815 the wire's
    annotations: dict[str, str] | None = None

    @property
    def version(self) -> int:
        """The version as a number."""
        written = self.resourceVersion
        if not (written.isascii() and written.isdecimal()):
            raise StoreError(
                f"kubernetes: the version of {self.name} is {written[:40]!r}, which is no number",
                slug="store-refused",
                expected="an API server that counts versions, as all that keep them in etcd do",
            )
        return int(written)


class Data(msgspec.Struct):
    """The data of a ConfigMap or Secret of the store: one value, in base64."""

    value: bytes = b""


class ConfigMapObject(msgspec.Struct):
    """A ConfigMap that holds the value of one key; null where it was emptied."""

    metadata: StoredMeta
    binaryData: Data | None = None  # noqa: N815 the wire's

    @property
    def value(self) -> bytes:
        """The value of the key."""
        return self.binaryData.value if self.binaryData else b""


class SecretObject(msgspec.Struct):
    """A Secret that holds the value of one key; null where it was emptied."""

    metadata: StoredMeta
    data: Data | None = None

    @property
    def value(self) -> bytes:
        """The value of the key."""
        return self.data.value if self.data else b""


Holding = ConfigMapObject | SecretObject


def holding_type(key: str) -> type[Holding]:
    """Return the type that the object of `key` is read as."""
    return SecretObject if resource_of(key) is SECRETS else ConfigMapObject


class LeaseSpec(msgspec.Struct):
    """A Lease's spec; all of it may be absent."""

    holderIdentity: str | None = None  # noqa: N815 the wire's
    leaseDurationSeconds: int | None = None  # noqa: N815 the wire's
    leaseTransitions: int | None = None  # noqa: N815 the wire's


class LeaseObject(msgspec.Struct):
    """A Lease as the server has it."""

    metadata: StoredMeta
    spec: LeaseSpec = msgspec.field(default_factory=LeaseSpec)

    @property
    def holder(self) -> str:
        """The holder's identity, "" for a free lease."""
        return self.spec.holderIdentity or ""

    @property
    def ttl_s(self) -> float:
        """How long the lease lasts after a renewal, in seconds."""
        return float(min(max(self.spec.leaseDurationSeconds or 1, 1), TTL_S_MAX))

    @property
    def term(self) -> int:
        """The term of the current holder; 0 if the annotation is unreadable."""
        written = (self.metadata.annotations or {}).get(TERM_ANNOTATION, "")
        return int(written) if re.fullmatch(r"[0-9]{1,18}", written) else 0

    @property
    def pod(self) -> str:
        """The uid of the holder's pod; "" if the holder is in no pod of an ElasticJob."""
        return (self.metadata.annotations or {}).get(POD_ANNOTATION, "")

    @property
    def value(self) -> bytes:
        """The value that the holder gave."""
        written = (self.metadata.annotations or {}).get(VALUE_ANNOTATION, "")
        try:
            return bytes.fromhex(written)
        except ValueError:
            return b""


class Anything(msgspec.Struct):
    """An object of which only the metadata is read."""

    metadata: StoredMeta


def manifest_of(
    key: str, value: bytes, version: int, owner: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the object that holds `value`; version 0: of an object that does not exist."""
    field = "data" if resource_of(key) is SECRETS else "binaryData"
    return {
        "apiVersion": "v1",
        "kind": resource_of(key).kind,
        "metadata": metadata_of(key, owner, version),
        field: {"value": value},
    }


def micro_time() -> str:
    """Return the time of day as a MicroTime, for people; no program compares it."""
    now = datetime.datetime.now(datetime.UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def metadata_of(key: str, owner: Mapping[str, Any] | None, version: int = 0) -> dict[str, Any]:
    """Return the metadata of a key's object; version 0: of one that does not exist, or any."""
    metadata: dict[str, Any] = {
        "name": object_name(key),
        "labels": labels_of(key),
        "annotations": {KEY_ANNOTATION: key},
    }
    if version:
        metadata["resourceVersion"] = str(version)
    if owner is not None:
        metadata["ownerReferences"] = [dict(owner)]
    return metadata
