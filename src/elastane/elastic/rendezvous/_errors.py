"""Maps elastane's errors to those that callers of a rendezvous handler catch, with their text."""

from __future__ import annotations

from typing import NoReturn

from elastane import errors
from elastane.elastic.rendezvous import api

_CONNECTION_SLUGS = (
    "no-coordinator",
    "endpoint-unresolvable",
    "not-a-coordinator",
    "endpoint-closed",
)
_STATE_SLUGS = ("store-record", "membership-forked")


def raise_as_api(error: errors.ElastaneError) -> NoReturn:
    """Raise the error of the rendezvous API that corresponds to `error`."""
    raise kind_of(error)(str(error)) from error


def kind_of(error: errors.ElastaneError) -> type[api.RendezvousError]:
    """Return the class of the rendezvous API for `error`."""
    if isinstance(error, errors.JoinTimeoutError):
        return api.RendezvousTimeoutError
    if isinstance(error, errors.JobClosedError) or error.slug == "job-closed":
        return api.RendezvousClosedError
    if isinstance(error, errors.StoreError) or error.slug in _CONNECTION_SLUGS:
        return api.RendezvousConnectionError
    if error.slug in _STATE_SLUGS:
        return api.RendezvousStateError
    return api.RendezvousError
