"""What an ElasticJob's operator wants of a running job, and what the job tells it.

Owns two ConfigMaps, which the operator makes: it writes `{job}-directive`, the job's coordinator
writes `{job}-report`. Neither waits for the other, and a job whose operator is away goes on. How it
fails: ApiError; what cannot be read is as good as not there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec

from elastane.kubernetes.bridge.messages import (
    REPORT_KEY,
    Directive,
    JobReport,
    dead_in,
    directive_name,
    report_name,
)
from elastane.kubernetes.client.resource import CONFIGMAPS
from elastane.kubernetes.client.single import follow_one
from elastane.protocol.unreadable import UNREADABLE

if TYPE_CHECKING:
    from elastane.kubernetes.store.store import KubernetesStore

_log = logging.getLogger(__name__)
# Uids of pods; the operator keeps some hundreds.
UIDS_MAX = 10_000


class ConfigMap(msgspec.Struct):
    """A ConfigMap, as far as it is read."""

    data: dict[str, str] | None = None


class Correspondence:
    """The two ConfigMaps of the ElasticJob `job`, over a store's connection."""

    def __init__(self, store: KubernetesStore, job: str) -> None:
        self._store = store
        self._directive = directive_name(job)
        self._report = report_name(job)

    async def directives(self) -> AsyncGenerator[Directive | None, None]:
        """Give the directive as it stands, None where there is none, and whenever it changes."""
        store = self._store
        follow = follow_one(store.api, CONFIGMAPS, store.namespace, self._directive, ConfigMap)
        async with contextlib.aclosing(follow) as changes:
            async for found in changes:
                yield None if found is None else read_directive(found.data or {})

    async def last_report(self) -> JobReport | None:
        """Return what was reported last, by whoever held the seat then."""
        store = self._store
        found = await store.api.find(CONFIGMAPS, store.namespace, self._report, ConfigMap)
        try:
            return msgspec.json.decode(
                ((found and found.data) or {}).get(REPORT_KEY, ""), type=JobReport
            )
        except UNREADABLE:
            return None

    async def tell(self, report: JobReport) -> None:
        """Put the report in the place of the last one."""
        store = self._store
        patch = {"data": {REPORT_KEY: msgspec.json.encode(report).decode()}}
        await store.api.patch(CONFIGMAPS, store.namespace, self._report, patch, ConfigMap)


def read_directive(data: dict[str, str]) -> Directive:
    """Read the directive's data; what makes no sense counts as not said."""
    nodes: tuple[int, int] | None = None
    written = (data.get("min", ""), data.get("max", ""))
    if all(text.isdecimal() and len(text) < 7 for text in written):
        low, high = int(written[0]), int(written[1])
        nodes = (low, high) if 1 <= low <= high else None
    if nodes is None and any(written):
        _log.warning("directive: min %r and max %r are no range of nodes", *written)
    fenced = data.get("fenced", "").split()
    return Directive(nodes, tuple(fenced[:UIDS_MAX]), tuple(dead_in(data)[:UIDS_MAX]))
