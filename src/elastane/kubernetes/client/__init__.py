"""A client of the Kubernetes API: requests, pages, watches, credentials.

`credentials` finds the server and the identity, from a service account or a kubeconfig; `identity`
keeps that identity valid. `resource` makes paths, `api` is the client with its watches, `errors`
turns answers into objects or errors. Only `transport` knows httpx, which is imported when a
connection is first made. The room knows no ElasticJob: the caller names the msgspec type that an
object is read as, and only the fields of that type are decoded.
"""

from elastane.kubernetes.client.api import Api, Deletion
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
    "Resource",
    "Selector",
    "find_access",
]
