"""The metadata of every object of the API server, as far as it is read here.

Times are kept as the strings that the server sent: an unreadable one must not make an object
unreadable. `since_epoch` and `as_time` translate.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec


class Owner(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One of an object's owner references."""

    uid: str = ""
    kind: str = ""
    name: str = ""
    controller: bool | None = None


class Meta(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An object's metadata. `edition` is what Kubernetes counts up with each change of the spec."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    edition: int = msgspec.field(default=0, name="generation")
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[Owner, ...] = ()

    @property
    def controller(self) -> str:
        """The uid of the object that controls this one, or the empty string."""
        return next((owner.uid for owner in self.owner_references if owner.controller), "")

    @property
    def is_leaving(self) -> bool:
        """Whether somebody has asked for its deletion."""
        return self.deletion_timestamp is not None


def since_epoch(time: str | None) -> float | None:
    """Return seconds since the epoch of an RFC 3339 time; None for what is none."""
    if not time:
        return None
    try:
        at = datetime.fromisoformat(time)
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def as_time(seconds: float) -> str:
    """Return the RFC 3339 time of seconds since the epoch, in whole seconds as the server's own."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
