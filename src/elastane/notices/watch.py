"""Follows the sources of notices in the agent's loop, and reports each notice once.

Each source has a task of its own, so that one that hangs delays no other. A source that fails, in
whatever way, is tried again after a pause that grows to `PAUSE_MAX_S`, and the console says so once
for each silence. It affects nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from elastane.errors import ElastaneError
from elastane.notices.aws import AwsMetadata
from elastane.notices.azure import AzureMetadata
from elastane.notices.dialogue import MetadataServer
from elastane.notices.gcp import maintenance, preemption
from elastane.notices.local import CommandReader, FileReader
from elastane.notices.metadata import MetadataReader
from elastane.notices.rules import NewNotices, NoticeSource, cloud_of
from elastane.protocol.events import Notice

_log = logging.getLogger("elastane.agent")
SLUG = "notice-source"
# The longest pause between two tries of a source that fails. Shorter than the shortest notice of a
# cloud, 30 s, with what the drain needs.
PAUSE_MAX_S = 10.0
# A source that failed so often in a row is reported.
FAILURES_TOLD = 3


class NoticeReader(Protocol):
    """One source that can be read again and again."""

    @property
    def pause_s(self) -> float:
        """How long to wait before the next time."""

    async def read(self) -> list[Notice]:
        """Return all notices that the source shows now; it may wait for a change."""

    async def close(self) -> None:
        """End what belongs to the source."""


class NoticeWatch:
    """The sources of one agent; `report` gets each notice."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        report: Callable[[Notice], None],
        lead_s: float,
        environ: Mapping[str, str],
    ) -> None:
        """`lead_s`: how long before its deadline a node leaves; `environ`: that of commands."""
        self._sources = sources
        self._report = report
        self._lead_s = lead_s
        self._environ = environ
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow the sources."""
        for source in self._sources:
            for reader in self._readers(source):
                self._tasks.append(asyncio.create_task(self._follow(str(source), reader)))

    async def close(self) -> None:
        """End it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _readers(self, source: NoticeSource) -> Sequence[NoticeReader]:
        match source.kind:
            case "file":
                return [FileReader(source)]
            case "command":
                return [CommandReader(source, self._environ)]
            case "auto":
                return self._readers_here()
            case cloud:
                return [MetadataReader(each, source.address) for each in _servers(cloud)]

    def _readers_here(self) -> Sequence[NoticeReader]:
        """Return the readers of this machine's cloud, which is found without a request."""
        cloud = cloud_of(read_dmi())
        if not cloud:
            _log.warning("--notices auto: this machine is in no known cloud, so nothing is read")
            return []
        _log.info("--notices auto: this machine is in %s", cloud)
        return self._readers(NoticeSource(cloud, ""))

    async def _follow(self, name: str, reader: NoticeReader) -> None:
        new, loop, failures = NewNotices(self._lead_s), asyncio.get_running_loop(), 0
        try:
            while True:
                try:
                    found = await reader.read()
                except Exception as error:
                    failures += 1
                    _log_failure(name, failures, error)
                else:
                    if failures >= FAILURES_TOLD:
                        _log.warning("notices of %s are read again", name)
                    failures = 0
                    for notice in new.news(found, loop.time()):
                        self._report(notice)
                await asyncio.sleep(_pause_s(reader.pause_s, failures))
        finally:
            await reader.close()


def _servers(cloud: str) -> Sequence[MetadataServer]:
    match cloud:
        case "aws":
            return [AwsMetadata()]
        case "gcp":
            return [preemption(), maintenance()]
        case _:
            return [AzureMetadata()]


def read_dmi(folder: Path = Path("/sys/class/dmi/id")) -> dict[str, str]:
    """Return what the firmware says of this machine; a file that cannot be read is left out."""
    found = {}
    for name in ("sys_vendor", "product_name", "chassis_asset_tag", "bios_version"):
        with contextlib.suppress(OSError):
            found[name] = (folder / name).read_text(errors="replace").strip()
    return found


def _pause_s(usual_s: float, failures: int) -> float:
    """Return the pause after `failures` in a row."""
    return max(usual_s, min(math.ldexp(usual_s, min(failures, 10)), PAUSE_MAX_S))


def _log_failure(name: str, failures: int, error: Exception) -> None:
    if failures == FAILURES_TOLD:
        text = "notices of %s cannot be read and are tried again: %s [%s]"
        _log.warning(text, name, _reason_of(error), SLUG)


def _reason_of(error: Exception) -> str:
    """Return why a source could not be read, in words; an error of the system has its own."""
    match error:
        case ElastaneError():
            return f"{error.what}; expected {error.expected}"
        case OSError(errno=int(number)):
            return os.strerror(number)
    return str(error) or type(error).__name__
