"""What a fake API server has: objects, their versions, and what happened to them.

Keeps to the real one's rules where a controller can tell the difference: one version counter for
all, uids, status apart from the rest, graceful deletion of pods that a node has, finalizers,
preconditions, a history that is compacted. It knows no HTTP.
"""

from __future__ import annotations

import copy
import itertools
import re
import time
import uuid
from collections import deque
from dataclasses import dataclass, field

# The field that counts changes of the spec.
SPEC_COUNT = "gener" + "ation"
HISTORY_MAX = 200_000


class RefusedError(Exception):
    """An answer that is no 200: Kubernetes' Status."""

    def __init__(self, code, reason, message="", details=None):
        super().__init__(message)
        self.code = code
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": reason,
            "message": message or reason,
            "code": code,
            **({"details": details} if details else {}),
        }


@dataclass(frozen=True)
class Event:
    version: int
    change: str
    group: str
    plural: str
    before: dict | None
    after: dict


@dataclass(frozen=True)
class Where:
    """What a path means."""

    group: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""


_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>status|scale))?"
)


def where_of(path):
    found = _PATH.fullmatch(path)
    if found is None:
        raise RefusedError(404, "NotFound", f"no such path: {path}")
    return Where(**{key: value or "" for key, value in found.groupdict().items()})


def merged(target, patch):
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def matches(one, labels="", fields=""):
    """Whether an object is what selectors ask for: equality, existence, inequality."""
    have = one["metadata"].get("labels") or {}
    for term in filter(None, labels.split(",")):
        key, sign, value = re.fullmatch(r"\s*([^=!\s]+)\s*(==|=|!=)?\s*(\S*)\s*", term).groups()
        equal = have.get(key) == value if sign else key in have
        if equal == (sign == "!="):
            return False
    for term in filter(None, fields.split(",")):
        key, _, value = term.partition("=")
        found = one
        for part in key.split("."):
            found = (found or {}).get(part)
        if (found or "") != value:
            return False
    return True


def _now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass
class Objects:
    """All objects of a server. Each change is one event of a growing version."""

    version: int = 100
    compacted: int = 0
    objects: dict = field(default_factory=dict)
    history: deque = field(default_factory=lambda: deque(maxlen=HISTORY_MAX))
    changed: list = field(default_factory=list)  # called with each event
    clock: itertools.count = field(default_factory=itertools.count)

    def kind(self, group, plural):
        return self.objects.setdefault((group, plural), {})

    def get(self, at):
        found = self.kind(at.group, at.plural).get((at.namespace, at.name))
        if found is None:
            name = f"{at.plural} {at.name!r} not found"
            raise RefusedError(404, "NotFound", name, {"name": at.name, "kind": at.plural})
        return found

    def create(self, at, body):
        meta = body.setdefault("metadata", {})
        name = meta.get("name") or meta.get("generateName", "") + uuid.uuid4().hex[:5]
        if at.namespace and meta.get("namespace") not in (None, "", at.namespace):
            raise RefusedError(400, "BadRequest", "the namespace does not match the path's")
        if (at.namespace, name) in self.kind(at.group, at.plural):
            raise RefusedError(409, "AlreadyExists", f"{at.plural} {name!r} already exists")
        meta |= {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        meta[SPEC_COUNT] = 1
        if at.namespace:
            meta["namespace"] = at.namespace
        if at.plural == "pods":
            body.setdefault("status", {}).setdefault("phase", "Pending")
        if at.plural == "elasticjobs":
            body.pop("status", None)
        return self._store(at, None, body, "ADDED")

    def write(self, at, body):
        """Put `body` in the place of what is there; what it does not name of metadata stays."""
        before = self.get(at)
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted and wanted != before["metadata"]["resourceVersion"]:
            message = f"Operation cannot be fulfilled on {at.plural} {at.name!r}: it was modified"
            raise RefusedError(409, "Conflict", message)
        if (
            body.get("metadata", {}).get("uid", before["metadata"]["uid"])
            != before["metadata"]["uid"]
        ):
            raise RefusedError(409, "Conflict", "the uid in the precondition differs")
        after = {**body, "metadata": {**body.get("metadata", {})}}
        kept = ("uid", "creationTimestamp", "namespace", "name", SPEC_COUNT, "deletionTimestamp")
        after["metadata"] |= {k: before["metadata"][k] for k in kept if k in before["metadata"]}
        has_status = at.plural in ("elasticjobs", "pods", "nodes")
        if at.subresource == "status":
            after = {**before, "status": after.get("status", {})}
            after["metadata"] = dict(before["metadata"])
        elif has_status:
            after["status"] = before.get("status", {})
        if after.get("spec") != before.get("spec"):
            after["metadata"][SPEC_COUNT] = before["metadata"].get(SPEC_COUNT, 1) + 1
        after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if not after.get("status"):
            after.pop("status", None)
        if after == before:
            return before
        if after["metadata"].get("deletionTimestamp") and not after["metadata"].get("finalizers"):
            return self._remove(at, after)
        return self._store(at, before, after, "MODIFIED")

    def patch(self, at, patch):
        before = self.get(at)
        return self.write(at, merged(before, patch))

    def delete(self, at, options):
        before = self.get(at)
        guards = options.get("preconditions") or {}
        for key in ("uid", "resourceVersion"):
            if guards.get(key) not in (None, before["metadata"][key]):
                raise RefusedError(409, "Conflict", f"the {key} in the precondition differs")
        grace_s = options.get("gracePeriodSeconds")
        if grace_s is None and at.plural == "pods":
            grace_s = before.get("spec", {}).get("terminationGracePeriodSeconds", 30)
        on_node = at.plural == "pods" and before.get("spec", {}).get("nodeName")
        ended = before.get("status", {}).get("phase") in ("Failed", "Succeeded")
        waits = bool(on_node and not ended and grace_s)
        if not waits and not before["metadata"].get("finalizers"):
            return self._remove(at, before)
        if "deletionTimestamp" in before["metadata"]:
            return before
        meta = {**before["metadata"], "deletionTimestamp": _now()}
        if grace_s is not None:
            meta["deletionGracePeriodSeconds"] = grace_s
        return self._store(at, before, {**before, "metadata": meta}, "MODIFIED")

    def listed(self, at, labels="", fields=""):
        kind = self.kind(at.group, at.plural)
        found = (one for (ns, _), one in sorted(kind.items()) if at.namespace in ("", ns))
        return [one for one in found if matches(one, labels, fields)]

    def compact(self):
        """Forget the history: a watch from an older version must list again."""
        self.compacted = self.version
        self.history.clear()

    def collect(self):
        """Remove what belongs to owners that are gone, as the garbage collector does."""
        uids = {one["metadata"]["uid"] for kind in self.objects.values() for one in kind.values()}
        for (group, plural), kind in list(self.objects.items()):
            for (namespace, name), one in list(kind.items()):
                owners = one["metadata"].get("ownerReferences") or []
                if owners and not any(owner["uid"] in uids for owner in owners):
                    self._remove(Where(group, plural, namespace, name), one)

    def _store(self, at, before, after, change):
        self.version += 1
        after = {**after, "metadata": {**after["metadata"], "resourceVersion": str(self.version)}}
        name = after["metadata"]["name"]
        self.kind(at.group, at.plural)[at.namespace, name] = after
        self._happened(Event(self.version, change, at.group, at.plural, before, after))
        return after

    def _remove(self, at, before):
        self.version += 1
        del self.kind(at.group, at.plural)[at.namespace, before["metadata"]["name"]]
        meta = {**before["metadata"], "resourceVersion": str(self.version)}
        after = {**before, "metadata": meta}
        self._happened(Event(self.version, "DELETED", at.group, at.plural, before, after))
        return after

    def _happened(self, event):
        self.history.append(event)
        for call in list(self.changed):
            call(event)


def told_as(event, at, labels, fields):
    """Return the event that a watch with these selectors gets for a change; None for no event."""
    if (event.group, event.plural) != (at.group, at.plural):
        return None
    if at.namespace and event.after["metadata"].get("namespace") != at.namespace:
        return None
    is_in = matches(event.after, labels, fields)
    was_in = event.before is not None and matches(event.before, labels, fields)
    if event.change == "DELETED":
        return "DELETED" if is_in or was_in else None
    if is_in:
        return "MODIFIED" if was_in else "ADDED"
    return "DELETED" if was_in else None


def copied(one):
    return copy.deepcopy(one)
