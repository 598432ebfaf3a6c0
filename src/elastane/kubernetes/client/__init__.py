"""A client of the Kubernetes API: requests, pages, watches, credentials; no object of ours.

`credentials` finds out which server is meant and who we are to it, `kubeconfig` and `execplugin`
read what people have for that, `resource` makes paths, `api` is the client, `watching` follows what
changes, `errors` is what can go wrong. Only `transport` knows httpx, which is imported when a
connection is first made. Objects are whatever msgspec type the caller reads: only its fields cost
anything.
"""

from elastane.kubernetes.client.api import Api, Deletion, ListPage
from elastane.kubernetes.client.credentials import ClusterAccess, find_access
from elastane.kubernetes.client.errors import (
    ApiAnswerError,
    ApiBusyError,
    ApiConflictError,
    ApiError,
    ApiForbiddenError,
    ApiGoneError,
    ApiInvalidError,
    ApiNotFoundError,
    ApiUnauthorizedError,
    ApiUnreachableError,
)
from elastane.kubernetes.client.resource import Resource, Selector
from elastane.kubernetes.client.watching import SeenObject

__all__ = [
    "Api",
    "ApiAnswerError",
    "ApiBusyError",
    "ApiConflictError",
    "ApiError",
    "ApiForbiddenError",
    "ApiGoneError",
    "ApiInvalidError",
    "ApiNotFoundError",
    "ApiUnauthorizedError",
    "ApiUnreachableError",
    "ClusterAccess",
    "Deletion",
    "ListPage",
    "Resource",
    "SeenObject",
    "Selector",
    "find_access",
]
