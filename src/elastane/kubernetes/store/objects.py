"""The ConfigMaps, Secrets and Leases of the store: the fields that are read and written.

Owns their shapes. Anything else on the wire is refused, and a field that was edited to nonsense
counts as absent. A version that is no number is a StoreError.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from elastane.errors import StoreError
from elastane.kubernetes.client.resource import SECRETS
from elastane.kubernetes.store.names import KEY_ANNOTATION, labels_of, object_name, resource_of

TERM_ANNOTATION = "elastane.dev/term"
VALUE_ANNOTATION = "elastane.dev/value"
# The uid of the pod in which the holder is, for who knows that the pod is dead.
POD_ANNOTATION = "elastane.dev/pod-uid"
# The holder of a lease writes its duration; no candidate waits longer than a day.
TTL_S_MAX = 86_400


class StoredMeta(msgspec.Struct):
    """An object's metadata, as far as it is read."""

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
                f"kubernetes: the version of {self.name} is {written[:40]!r}, no number",
                slug="store-refused",
                expected="an API server that counts versions, as all that keep them in etcd do",
            )
        return int(written)


class Data(msgspec.Struct):
    """The data of an object of ours: one value, in base64."""

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
        """How long it lasts after a renewal."""
        return float(min(max(self.spec.leaseDurationSeconds or 1, 1), TTL_S_MAX))

    @property
    def term(self) -> int:
        """The term of the holding, 0 where it cannot be told."""
        written = (self.metadata.annotations or {}).get(TERM_ANNOTATION, "")
        return int(written) if re.fullmatch(r"[0-9]{1,18}", written) else 0

    @property
    def pod(self) -> str:
        """The uid of its holder's pod, "" where it is in none of an ElasticJob's."""
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
    """An object of which only the metadata matters."""

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
