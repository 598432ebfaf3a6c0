"""The store over the Kubernetes API.

Owns how the operations of a Store become requests. A version is a resourceVersion, which grows over
the whole life of the cluster. A conditional write is a PUT with that version. The module knows
nothing of jobs. In a pod of an ElasticJob the objects belong to that job, and are deleted with it.
Elsewhere they stay until `purge`, or until a person deletes them by their label.

It fails as stores.protocol says. A 403 is a ConfigurationError that names the needed Role, but only
if that kind of request was never allowed before. A new API server answers 403 until it has read its
Roles, and a running one until it has learned of a new Role. So a 403 is retried for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from elastane.errors import ConfigurationError, StoreError
from elastane.kubernetes.client import (
    Api,
    ApiBusyError,
    ApiConflictError,
    ApiError,
    ApiForbiddenError,
    ApiNotFoundError,
    ApiUnauthorizedError,
    ApiUnreachableError,
    Deletion,
    Resource,
    Selector,
)
from elastane.kubernetes.client.api import follow_one
from elastane.kubernetes.client.resource import CONFIGMAPS, LEASES, SECRETS
from elastane.kubernetes.store.lease import KubernetesLease, LeaseCandidacy, LeasePlace, end_holding
from elastane.kubernetes.store.objects import (
    JOB_LABEL,
    KEY_ANNOTATION,
    Anything,
    Holding,
    holding_type,
    job_label,
    manifest_of,
    metadata_of,
    object_name,
    resource_of,
)
from elastane.kubernetes.store.settings import KubernetesSettings
from elastane.protocol.limits import STORE_TIMEOUT_S
from elastane.stores import (
    ConflictError,
    Entry,
    Holder,
    boot_clock,
    check_key,
    check_ttl,
    check_value,
    write_expecting,
)

T = TypeVar("T")

# An API server learns of a new Role within a second.
REFUSED_S = 3.0
_VERBS = "get,list,watch,create,update,delete"


class AllowedAccess:
    """The kinds of requests that the server has allowed to one store."""

    def __init__(self) -> None:
        self._allowed: set[str] = set()
        self._refused_s: dict[str, float] = {}

    async def answer(self, request: str, namespace: str, asking: Awaitable[T]) -> T:
        """Return the answer; raise an error of the API as an error of the store.

        `request` is the verb and the kind (`update secrets`). A conflict or a missing object is
        raised unchanged, since callers expect both.
        """
        try:
            answer = await asking
        except ApiUnreachableError as error:
            raise _store_error(
                error, "store-unsure" if error.sent else "store-unreachable"
            ) from error
        except ApiBusyError as error:
            # A 5xx may come after the write was carried out.
            is_read = request.startswith(("get", "list", "watch")) or error.status == 429
            slug = "store-unreachable" if is_read else "store-unsure"
            raise _store_error(error, slug) from error
        except (ApiForbiddenError, ApiUnauthorizedError) as error:
            raise self._refusal(request, namespace, error) from error
        except ApiError as error:
            if error.status in (404, 409, 410):
                self._allow(request)
                raise
            raise _store_error(error, "store-refused") from error
        self._allow(request)
        return answer

    def _allow(self, request: str) -> None:
        self._allowed.add(request)
        self._refused_s.pop(request, None)

    def _refusal(self, request: str, namespace: str, error: ApiError) -> Exception:
        now_s = asyncio.get_running_loop().time()
        since_s = self._refused_s.setdefault(request, now_s)
        if request in self._allowed or now_s - since_s < REFUSED_S:
            return _store_error(error, error.slug)
        if isinstance(error, ApiUnauthorizedError):
            return ConfigurationError(
                error.what, slug=error.slug, where=error.where, next_step=error.next_step
            )
        return ConfigurationError(
            error.what,
            slug=error.slug,
            where=error.where,
            expected=f"a Role in namespace {namespace} that allows to {_VERBS.replace(',', ', ')} "
            "configmaps, secrets and leases.coordination.k8s.io, bound to this account",
            next_step=f"kubectl -n {namespace} create role elastane --verb={_VERBS} "
            "--resource=configmaps,secrets,leases.coordination.k8s.io && "
            f"kubectl -n {namespace} create rolebinding elastane --role=elastane "
            f"--serviceaccount={namespace}:default",
        )


def _store_error(error: ApiError, slug: str) -> StoreError:
    return StoreError(
        error.what,
        slug=slug,
        where=error.where,
        expected=error.expected,
        next_step=error.next_step,
    )


class KubernetesStore:
    """One process's view of a namespace. Nothing is read or sent before the first operation."""

    def __init__(
        self,
        settings: KubernetesSettings,
        *,
        timeout_s: float = STORE_TIMEOUT_S,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.clock = clock
        self._settings = settings
        self._timeout_s = timeout_s
        self._api: Api | None = None
        self._access = AllowedAccess()
        self._places: dict[str, LeasePlace] = {}
        self._owner: dict[str, Any] | None = None
        self._owner_sought = not settings.elastic_job
        self._touched: set[tuple[Resource, str]] = set()

    @property
    def urls(self) -> tuple[str, ...]:
        """The address of the API server, towards which this pod's address is chosen."""
        return (self.api.access.server,)

    @property
    def api(self) -> Api:
        """The client, once credentials were found; ConfigurationError where there are none."""
        if self._api is None:
            self._api = Api(self._settings.access(), timeout_s=self._timeout_s, connections_max=8)
        return self._api

    @property
    def namespace(self) -> str:
        """The namespace of the objects."""
        return self.api.access.namespace

    async def get(self, key: str) -> Entry | None:
        """See Store.get."""
        check_key(key)
        resource = resource_of(key)
        asking = self.api.find(resource, self.namespace, object_name(key), holding_type(key))
        return _entry(await self.ask(f"get {resource.plural}", asking))

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int, ttl_s: float | None = None
    ) -> Entry:
        """See Store.compare_and_set. The API removes nothing on a timer: `ttl_s` has no effect."""
        check_key(key)
        check_value(key, value)
        if ttl_s is not None:
            check_ttl(key, ttl_s)
        await self.find_owner()
        manifest = manifest_of(key, value, expected_version, self._owner)
        self._touched.add((resource_of(key), key))

        async def write() -> Entry | None:
            try:
                written = await self._write(key, manifest, expected_version)
            except (ApiConflictError, ApiNotFoundError) as error:
                if isinstance(error, ApiNotFoundError) and not expected_version:
                    raise self._no_namespace(error) from error
                return None
            return Entry(value, written.metadata.version)

        return await write_expecting(
            expected_version, write, lambda: self.get(key), key, "kubernetes"
        )

    async def delete(self, key: str, expected_version: int) -> None:
        """See Store.delete."""
        check_key(key)
        if not expected_version:
            raise ConflictError(key, 0, await self.get(key))
        how = Deletion(version=str(expected_version))
        resource = resource_of(key)
        asking = self.api.delete(resource, self.namespace, object_name(key), how)
        try:
            await self.ask(f"delete {resource.plural}", asking)
        except (ApiConflictError, ApiNotFoundError) as error:
            raise ConflictError(key, expected_version, await self.get(key)) from error

    async def lease(self, key: str, value: bytes, ttl_s: float) -> KubernetesLease | None:
        """See Store.lease."""
        check_key(key)
        check_value(key, value)
        check_ttl(key, ttl_s)
        await self.find_owner()
        self._touched.add((LEASES, key))
        return await LeaseCandidacy(self._place(key), key, value, ttl_s).take()

    async def holder(self, key: str) -> Holder | None:
        """See Store.holder."""
        check_key(key)
        place = self._place(key)
        found = await place.find()
        if found is None or place.is_free(found):
            return None
        return Holder(found.value, found.term)

    async def end_lease(self, key: str, term: int) -> None:
        """See Store.end_lease."""
        check_key(key)
        await end_holding(self._place(key), lambda found: found.term == term)

    async def watch(self, key: str, after_version: int) -> AsyncGenerator[Entry | None, None]:
        """See Store.watch."""
        check_key(key)
        known, resource = after_version, resource_of(key)
        follow = follow_one(self.api, resource, self.namespace, object_name(key), holding_type(key))
        async with contextlib.aclosing(follow):
            while True:
                entry = _entry(await self.ask(f"watch {resource.plural}", anext(follow)))
                if entry is not None and entry.version > known:
                    known = entry.version
                    yield entry
                elif entry is None and known:
                    known = 0
                    yield None

    async def purge(self, prefix: str) -> None:
        """See Store.purge. Without the right to list: only the objects that this process used."""
        check_key(prefix)
        for resource in (CONFIGMAPS, SECRETS, LEASES):
            known = {(object_name(key), key) for kind, key in self._touched if kind == resource}
            for name, key in known | await self._listed(resource, prefix):
                if key == prefix or key.startswith(prefix + "/"):
                    with contextlib.suppress(ApiNotFoundError):
                        asking = self.api.delete(resource, self.namespace, name)
                        await self.ask(f"delete {resource.plural}", asking)

    async def close(self) -> None:
        """See Store.close."""
        if self._api is not None:
            await self._api.close()

    async def ask(self, request: str, asking: Awaitable[T]) -> T:
        """Return the answer of the API; its errors become the store's (AllowedAccess.answer)."""
        return await self._access.answer(request, self.namespace, asking)

    async def find_owner(self) -> None:
        """Look up the owner of new objects: an object that the operator made for this job."""
        if self._owner_sought:
            return
        name = f"{self._settings.elastic_job}-report"
        asking = self.api.find(CONFIGMAPS, self.namespace, name, Anything)
        try:
            found = await self.ask("get configmaps", asking)
        except StoreError:
            return  # The next write looks again.
        except ConfigurationError:
            found = None  # This account may not read it, so new objects get no owner.
        self._owner_sought = True
        if found is not None:
            self._owner = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "name": name,
                "uid": found.metadata.uid,
            }

    async def _write(self, key: str, manifest: dict[str, Any], version: int) -> Holding:
        resource, kind = resource_of(key), holding_type(key)
        if version:
            asking = self.api.replace(resource, self.namespace, manifest, kind)
            return await self.ask(f"update {resource.plural}", asking)
        asking = self.api.create(resource, self.namespace, manifest, kind)
        return await self.ask(f"create {resource.plural}", asking)

    def _place(self, key: str) -> LeasePlace:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = LeasePlace(
                self.api,
                self.namespace,
                lambda: metadata_of(key, self._owner),
                self.ask,
                self.clock,
                pod=self._settings.pod,
            )
        return place

    async def _listed(self, resource: Resource, prefix: str) -> set[tuple[str, str]]:
        """Return names and keys of a job's objects; none if this account may not list them."""
        selector = Selector(labels=f"{JOB_LABEL}={job_label(prefix)}")
        asking = self.api.list(resource, self.namespace, Anything, selector)
        with contextlib.suppress(ApiForbiddenError):
            found = await asking
            return {
                (each.metadata.name, (each.metadata.annotations or {}).get(KEY_ANNOTATION, ""))
                for each in found.items
            }
        return set()

    def _no_namespace(self, error: ApiNotFoundError) -> ConfigurationError:
        return ConfigurationError(
            error.what,
            slug="kube-not-found",
            where=error.where,
            expected="a namespace that exists",
            next_step=f"kubectl create namespace {self.namespace}, or name another one: "
            "--rdzv-endpoint NAMESPACE",
        )


def _entry(found: Holding | None) -> Entry | None:
    return None if found is None else Entry(found.value, found.metadata.version)
