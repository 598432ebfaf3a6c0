"""Carries out one decision about one job, in the order that the decision demands.

Owns the handling of each answer of the API server. The result of a write goes into the caches
immediately. A refusal is kept for the next decision. Any other failure is an exception, and the
whole decision is made again after a backoff.

A repeated decision does nothing twice: pods and objects are created by name, deleted by uid, and
patched with their uid; the status replaces only the version that it was made from.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from elastane.errors import LeaseLostError, StoreError
from elastane.kubernetes.client import (
    Api,
    ApiConflictError,
    ApiError,
    ApiForbiddenError,
    ApiInvalidError,
    ApiNotFoundError,
    Deletion,
)
from elastane.kubernetes.client.resource import SECRETS
from elastane.kubernetes.model import (
    CreateObject,
    CreatePod,
    CreateToken,
    Decision,
    DeleteJob,
    DeleteObject,
    DeletePod,
    ElasticJob,
    PatchObject,
    Refusal,
    ReleaseLease,
    as_wire,
    merge_patch,
)
from elastane.kubernetes.operator.bounds import BATCH_FACTOR, BATCH_FIRST, WRITES_IN_FLIGHT_MAX
from elastane.kubernetes.operator.metrics import Metrics
from elastane.kubernetes.operator.view import BY_KIND, JOBS, ClusterView, OwnedKind, type_of
from elastane.kubernetes.reconcile.manifest import TOKEN_KEY
from elastane.kubernetes.store.lease import LeasePlace, free_of
from elastane.stores import new_token

_log = logging.getLogger(__name__)
T = TypeVar("T")
Creation = CreatePod | CreateObject
Verb = Literal["create", "patch", "delete"]
_ENDS = (DeletePod, DeleteJob)


class StaleError(Exception):
    """An object that the decision rests on has changed: the job has to be decided again."""


class StatusRefusedError(Exception):
    """The job's spec violates the resource's definition, so no status can be written."""

    def __init__(self, error: ApiInvalidError) -> None:
        super().__init__(error.what)
        self.error = error


class Executor:
    """Carries out decisions. `may_act` is asked before each write."""

    def __init__(
        self, api: Api, view: ClusterView, metrics: Metrics, may_act: Callable[[], bool]
    ) -> None:
        self._api = api
        self._view = view
        self._metrics = metrics
        self._may_act = may_act
        self._in_flight = asyncio.Semaphore(WRITES_IN_FLIGHT_MAX)

    async def carry_out(self, key: str, job: ElasticJob, decision: Decision) -> None:
        """Write the status and carry out all actions.

        Raises StaleError or ApiError if the job has to be decided again.
        """
        if decision.status_first:
            await self._write_status(job, decision)
        refused = await self._objects(key, job, decision)
        # The Lease comes after the directive: the next coordinator reads there which pods are dead.
        for action in decision.actions:
            if isinstance(action, ReleaseLease):
                await self._release_lease(job.metadata.namespace, action)
        on_pods = [one for one in decision.actions if isinstance(one, (CreatePod, *_ENDS))]
        creations = [one for one in on_pods if isinstance(one, CreatePod)]
        deletions = [one for one in on_pods if not isinstance(one, CreatePod)]
        # Without an object that they need, pods are not created; deletions are carried out.
        work: list[Awaitable[None]] = [self._each(key, job, deletions)]
        if not refused:
            work.append(self._create_pods(key, job, creations))
        await _all(work)
        if not decision.status_first:
            await self._write_status(job, decision)

    async def _write_status(self, job: ElasticJob, decision: Decision) -> None:
        if decision.status is None:
            return
        patch = merge_patch(job.status, as_wire(decision.status))
        if patch is None:
            return
        meta = job.metadata
        body = {"metadata": {"resourceVersion": meta.resource_version}, "status": patch}
        try:
            written = await self._write(
                "PatchStatus",
                lambda: self._api.patch(
                    JOBS, meta.namespace, meta.name, body, ElasticJob, "status"
                ),
            )
        except (ApiConflictError, ApiNotFoundError):
            await self._refresh(JOBS.kind, meta.namespace, meta.name, meta.uid)
            raise StaleError(f"{meta.name} was changed meanwhile") from None
        except ApiInvalidError as error:
            raise StatusRefusedError(error) from error
        self._view.jobs.wrote(written)

    async def _refresh(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Read an object again that another client has changed or removed."""
        cache = self._view.cache_of(kind)
        found: Any = await self._api.find(BY_KIND[kind], namespace, name, type_of(kind))
        if found is None or found.metadata.uid != uid:
            cache.lacks(f"{namespace}/{name}", uid)
        if found is not None:
            cache.wrote(found)

    async def _objects(self, key: str, job: ElasticJob, decision: Decision) -> bool:
        """Carry out the actions on objects, one by one; return whether any was refused."""
        refused = False
        for action in decision.actions:
            if isinstance(action, CreateObject):
                # A later object may need this one, as a RoleBinding needs its ServiceAccount.
                refused = refused or await self._create(key, job, action)
            elif isinstance(action, CreateToken):
                refused = refused or await self._create_token(key, job, action)
            elif isinstance(action, (PatchObject, DeleteObject)):
                await self._one(key, job, action)
        return refused

    async def _create_pods(self, key: str, job: ElasticJob, pods: Sequence[CreatePod]) -> None:
        """Create pods at the same time, few at first; stop after a refusal."""
        at, batch = 0, BATCH_FIRST
        while at < len(pods):
            refused = await _all([self._create(key, job, pod) for pod in pods[at : at + batch]])
            if any(refused):
                return
            at, batch = at + batch, BATCH_FACTOR * batch

    async def _create(self, key: str, job: ElasticJob, action: Creation) -> bool:
        """Create one object; return whether the API server refused it."""
        kind = "Pod" if isinstance(action, CreatePod) else action.kind
        resource, namespace = BY_KIND[kind], job.metadata.namespace
        made: Any
        try:
            made = await self._write(
                f"Create{kind}",
                lambda: self._api.create(resource, namespace, action.manifest, type_of(kind)),
            )
        except ApiConflictError as error:
            if not error.exists:
                raise
            return await self._occupied(key, job, kind, action.name, error)
        except (ApiInvalidError, ApiForbiddenError, ApiNotFoundError) as error:
            if isinstance(error, ApiForbiddenError) and error.namespace_ends:
                raise
            self._refuse(key, kind, action.name, error)
            return True
        self._view.cache_of(kind).wrote(made)
        return False

    async def _create_token(self, key: str, job: ElasticJob, action: CreateToken) -> bool:
        """Create the job's Secret with a random token; return whether that was refused."""
        namespace = job.metadata.namespace
        token = base64.b64encode(new_token().encode()).decode()
        manifest = action.manifest | {"data": {TOKEN_KEY: token}}
        try:
            await self._write(
                "CreateSecret", lambda: self._api.create(SECRETS, namespace, manifest, OwnedKind)
            )
        except ApiConflictError as error:
            if not error.exists:
                raise
        except (ApiInvalidError, ApiForbiddenError, ApiNotFoundError) as error:
            if isinstance(error, ApiForbiddenError) and error.namespace_ends:
                raise
            self._refuse(key, SECRETS.kind, action.name, error)
            return True
        return False

    async def _occupied(
        self, key: str, job: ElasticJob, kind: str, name: str, error: ApiError
    ) -> bool:
        """Read the object that has the name: cache it if it is the job's, else keep a refusal."""
        namespace = job.metadata.namespace
        found: Any = await self._api.find(BY_KIND[kind], namespace, name, type_of(kind))
        if found is None:
            raise StaleError(f"{kind} {name} existed, and was deleted")
        self._view.cache_of(kind).wrote(found)
        if found.metadata.controller == job.metadata.uid:
            # Created by us, by an operator before us, or by a request whose answer was lost.
            self._metrics.count("elastane_adopted_total", kind=kind)
            return False
        self._refuse(key, kind, name, error)
        return True

    def _refuse(
        self, key: str, kind: str, name: str, error: ApiError, verb: Verb = "create"
    ) -> None:
        _log.warning("job %s: %s", key, error)
        self._metrics.count("elastane_refusals_total", code=str(error.status))
        self._view.refuse(
            key,
            Refusal(
                kind=kind,
                name=name,
                code=error.status,
                message=error.message,
                at_s=time.time(),
                verb=verb,
            ),
        )

    async def _each(self, key: str, job: ElasticJob, actions: Sequence[Any]) -> None:
        await _all([self._one(key, job, action) for action in actions])

    async def _one(self, key: str, job: ElasticJob, action: Any) -> None:
        """Carry out a patch or a deletion; a refusal is kept for the next decision, and raised."""
        namespace = job.metadata.namespace
        verb: Verb = "delete"
        if isinstance(action, PatchObject):
            verb, kind, name = "patch", action.kind, action.name
            work = self._patch(namespace, action)
        elif isinstance(action, DeleteJob):
            kind, name = JOBS.kind, job.metadata.name
            how = Deletion(uid=action.uid, propagation="Background")
            work = self._delete(namespace, kind, name, how)
        elif isinstance(action, DeletePod):
            kind, name = "Pod", action.name
            _log.info("job %s/%s: pod %s goes: %s", namespace, job.metadata.name, name, action.why)
            how = Deletion(uid=action.uid, grace_s=action.grace_s)
            work = self._delete(namespace, kind, name, how)
        else:
            kind, name = action.kind, action.name
            work = self._delete(namespace, kind, name, Deletion(uid=action.uid))
        try:
            await work
        except (ApiForbiddenError, ApiInvalidError) as error:
            self._refuse(key, kind, name, error, verb)
            raise
        self._view.granted(key, verb, kind, name)

    async def _delete(self, namespace: str, kind: str, name: str, how: Deletion) -> None:
        """Delete an object; one that is gone already is no error."""
        try:
            await self._write(
                f"Delete{kind}", lambda: self._api.delete(BY_KIND[kind], namespace, name, how)
            )
        except (ApiNotFoundError, ApiConflictError):
            await self._refresh(kind, namespace, name, how.uid)

    async def _patch(self, namespace: str, action: PatchObject) -> None:
        resource, kind = BY_KIND[action.kind], action.kind
        written: Any
        try:
            written = await self._write(
                f"Patch{kind}",
                lambda: self._api.patch(
                    resource, namespace, action.name, action.patch, type_of(kind)
                ),
            )
        except (ApiNotFoundError, ApiConflictError):
            uid = action.patch.get("metadata", {}).get("uid", "")
            await self._refresh(kind, namespace, action.name, uid)
            raise StaleError(f"another {kind} has the name {action.name} now") from None
        self._view.cache_of(kind).wrote(written)

    async def _release_lease(self, namespace: str, action: ReleaseLease) -> None:
        """Release the Lease, without a retry: after a failure the Lease expires by itself."""
        place = LeasePlace(self._api, namespace, lambda: {"name": action.lease}, patches=True)
        try:
            uid = await self._write("ReleaseLease", lambda: free_of(place, action.pods))
        except (ApiError, StoreError) as error:
            _log.info("lease %s/%s: %s: it expires by itself", namespace, action.lease, error.what)
            return
        if uid:
            said = "pod %s is dead: the lease %s/%s is given back for it"
            _log.info(said, action.pods[uid], namespace, action.lease)

    async def _write(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        async with self._in_flight:
            if not self._may_act():
                raise LeaseLostError(
                    "this operator no longer holds its lease", slug="operator-lease-lost"
                )
            try:
                done = await ask()
            except ApiError as error:
                self._metrics.count("elastane_writes_total", what=what, code=str(error.status))
                raise
        self._metrics.count("elastane_writes_total", what=what, code="2xx")
        return done


async def _all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Wait until all of the work has ended, then raise the first exception."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
