"""The meaning of the API's errors for a store, and when a 403 is more than temporary.

Owns the mapping. A 403 is final where that kind of request was never allowed: then it is a
ConfigurationError with the Role that is needed. But an API server that was just started answers 403
until it has read its Roles, and a running one until it has heard of a new Role. So a refusal counts
only after a moment, and never once the same request was allowed before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from elastane.errors import ConfigurationError, StoreError
from elastane.kubernetes.client import (
    ApiBusyError,
    ApiError,
    ApiForbiddenError,
    ApiUnauthorizedError,
    ApiUnreachableError,
)

T = TypeVar("T")
# An API server hears of a new Role within a second.
REFUSED_S = 3.0
_VERBS = "get,list,watch,create,update,delete"


class AllowedAccess:
    """One store's memory of what the server allowed it."""

    def __init__(self) -> None:
        self._allowed: set[str] = set()
        self._refused_s: dict[str, float] = {}

    async def told(self, deed: str, namespace: str, asking: Awaitable[T]) -> T:
        """Return the answer; what is no store's business as the store's error.

        `deed` is the verb and the kind (`update secrets`). Conflicts, and what does not exist, go
        through as they are: they are answers.
        """
        try:
            answer = await asking
        except ApiUnreachableError as error:
            raise _store_error(
                error, "store-unsure" if error.sent else "store-unreachable"
            ) from error
        except ApiBusyError as error:
            # A 5xx of a write may come after it was done.
            is_read = deed.startswith(("get", "list", "watch")) or error.status == 429
            slug = "store-unreachable" if is_read else "store-unsure"
            raise _store_error(error, slug) from error
        except (ApiForbiddenError, ApiUnauthorizedError) as error:
            raise self._refusal(deed, namespace, error) from error
        except ApiError as error:
            if error.status in (404, 409, 410):
                self._allow(deed)
                raise
            raise _store_error(error, "store-refused") from error
        self._allow(deed)
        return answer

    def _allow(self, deed: str) -> None:
        self._allowed.add(deed)
        self._refused_s.pop(deed, None)

    def _refusal(self, deed: str, namespace: str, error: ApiError) -> Exception:
        now_s = asyncio.get_running_loop().time()
        since_s = self._refused_s.setdefault(deed, now_s)
        if deed in self._allowed or now_s - since_s < REFUSED_S:
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
