"""Which object holds which key: its kind, and a name that the API server accepts.

Owns the mapping. `run-1/record` is the ConfigMap `elastane-run-1.record`; a key whose parts are not
valid object names gets a digest, under another prefix, so that no two keys share an object. Only
the job's token is a Secret: an account that runs workers then needs no right to read Secrets.
"""

from __future__ import annotations

import hashlib
import re

from elastane.kubernetes.client import Resource
from elastane.kubernetes.client.resource import CONFIGMAPS, SECRETS
from elastane.stores import TOKEN_PART, JobNames

# A label of RFC 1123; an object's name is such labels joined by dots, 253 characters at most.
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


def config_maps_of(job: str) -> tuple[str, ...]:
    """Return the names of the ConfigMaps that a job (`--rdzv-id`) keeps."""
    keys = JobNames(job)
    return tuple(object_name(key) for key in (keys.coordinator, keys.record))


def lease_of(job: str) -> str:
    """Return the name of the Lease by which a job elects its coordinator."""
    return object_name(JobNames(job).leadership)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
