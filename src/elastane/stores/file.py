"""A store in a folder that all nodes of a job share, also on NFS.

Owns the layout: `<folder>/<key>/@entry/` holds the versions of a key as numbered pages,
`<folder>/<key>/@lease/` the terms of a lease as numbered pages and the holder's heartbeat,
`<folder>/@identity/` tells this folder from an empty mount point. Knows nothing of jobs.

The rules of a lease, which is safe without a server and without comparing two clocks:
1. The process that links term n+1 holds it. A term is `held` or `free`; release links a `free` one.
2. The holder rewrites the small file `beat.<n>` at each renewal (in place, so that a full disk
   does not cost it the lease).
3. Another process may link term n+1 once it has read the same heartbeat twice. Between the end of
   the first read and the start of the second, at least the holder's ttl must pass by its own clock.
4. The holder counts its ttl, less a margin, from before it wrote. So it stops before rule 3 can be
   met. After that a renewal is not enough: the holder too must link term n+1, in the same race as
   the others. If it wins, no other process held the lease meanwhile.

A holder that was stopped (SIGSTOP, a suspended machine) notices by its own clock, which counts
suspension. Its write in flight is fenced as stores.protocol says.

It fails with ConfigurationError where other users may write, or have written. Otherwise with a
StoreError that names the path and the next step. A folder that hangs costs a daemon thread and the
operation's bound, never the event loop.
"""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from elastane.errors import ConfigurationError, LeaseLostError, StoreError
from elastane.process.files import make_folders
from elastane.process.offload import Offload
from elastane.protocol.limits import STORE_POLL_S, STORE_TIMEOUT_S
from elastane.stores.pages import (
    FolderPage,
    Hooks,
    PageReading,
    Pages,
    Root,
)
from elastane.stores.protocol import (
    ConflictError,
    Entry,
    HeldLease,
    Holder,
    boot_clock,
    check_key,
    check_ttl,
    check_value,
    watch_by_polling,
)
from elastane.stores.registry import StoreBackend, StorePlace

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SKIPS_NAMED_MAX = 1000
_BEAT_BYTES = 20
_NEXT_STEPS = {
    errno.ENOSPC: "free space on that file system; the job continues by itself",
    errno.EDQUOT: "free space within this user's quota; the job continues by itself",
    errno.EROFS: "mount that file system for writing on this node",
    errno.EACCES: "let this user read, write and search that folder",
    errno.EPERM: "let this user write there, on a file system that has hard links",
    errno.ENOTSUP: "choose a folder on a file system that has hard links",
    errno.EMLINK: "choose a folder on a file system that has hard links",
    errno.ENOENT: "restore the folder, or mount its file system on this node",
    errno.ENOTDIR: "name a folder, not a file",
    errno.ESTALE: "mount that file system again on this node",
    errno.EIO: "look at the health of that file system and its server",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def _no_step(step: str) -> None:
    """Do nothing at a step; tests put a hook in its place."""


@dataclass(frozen=True)
class _Sighting:
    """A heartbeat as this process saw it, and the time when its first read had ended."""

    nonce: str
    content: bytes
    seen_s: float


class _TakenTerm(NamedTuple):
    """A term that this process linked, and when it began to."""

    term: int
    begun_s: float


class FileStore:
    """One process's view of the folder. Nothing is read or made before the first operation."""

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: float = STORE_TIMEOUT_S,
        poll_s: float = STORE_POLL_S,
        clock: Callable[[], float] = boot_clock,
        on_step: Callable[[str], None] = _no_step,
    ) -> None:
        self.folder = folder
        self._root = Root(folder)
        self.timeout_s = timeout_s
        self.clock = clock
        self._poll_s = poll_s
        self.on_step = on_step
        self._offload = Offload()
        self._identity: FolderPage | None = None
        self._sightings: dict[str, _Sighting] = {}
        self._skipped: set[Path] = set()
        self._running = threading.local()  # the deadline of the operation that a thread runs

    async def get(self, key: str) -> Entry | None:
        """See Store.get."""
        return await self.run(lambda: _entry(self.entries(key).latest()))

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int, ttl_s: float | None = None
    ) -> Entry:
        """See Store.compare_and_set: what a folder holds stays there."""
        check_value(key, value)
        page = await self.run(lambda: self._replace(key, expected_version, "value", value))
        return Entry(value, page.number)

    async def delete(self, key: str, expected_version: int) -> None:
        """See Store.delete. The value itself is removed from the folder: it may be a secret."""
        if expected_version < 1:
            raise ConflictError(key, expected_version, await self.get(key))
        await self.run(lambda: self._replace(key, expected_version, "gone", b""))

    async def lease(self, key: str, value: bytes, ttl_s: float) -> FileLease | None:
        """See Store.lease."""
        check_value(key, value)
        check_ttl(key, ttl_s)
        return await self.run(lambda: self._take(key, value, ttl_s))

    async def holder(self, key: str) -> Holder | None:
        """See Store.holder. May name a holder that died up to a ttl ago, as seen here."""
        return await self.run(lambda: self._holder(key))

    async def end_lease(self, key: str, term: int) -> None:
        """See Store.end_lease."""
        await self.run(lambda: self.free_term(key, term))

    def watch(self, key: str, after_version: int) -> AsyncGenerator[Entry | None, None]:
        """See Store.watch."""
        return watch_by_polling(lambda: self.get(key), after_version, self._poll_s)

    async def purge(self, prefix: str) -> None:
        """See Store.purge."""
        path = self.folder / _below(prefix)
        await self.run(lambda: shutil.rmtree(path) if path.exists() else None)

    async def close(self) -> None:
        """See Store.close."""

    async def run(self, call: Callable[[], T]) -> T:
        """Run a blocking operation on the folder within the bound."""
        # Counted from the call, as the caller does: the operation itself may begin later.
        until_s = self.clock() + self.timeout_s

        def checked() -> T:
            self._running.until_s = until_s
            self._check_identity()
            return call()

        try:
            return await self._offload.run(checked, self.timeout_s)
        except TimeoutError as error:
            raise _hangs(self.folder, self.timeout_s) from error
        except OSError as error:
            raise _trouble(self.folder, error) from error

    def entries(self, key: str) -> Pages:
        """Return the versions of a key."""
        return Pages(_below(key) / "@entry", self._root, self._hooks(), whole=True)

    def terms(self, key: str) -> Pages:
        """Return the terms of a lease.

        A damaged newest term is skipped. Its holder sees another term than its own and stops, and
        the next term has a higher number.
        """
        return Pages(_below(key) / "@lease", self._root, self._hooks())

    def _replace(self, key: str, expected_version: int, kind: str, value: bytes) -> FolderPage:
        pages = self.entries(key)
        while True:
            reading = pages.latest()
            current = _entry(reading)
            if (current.version if current else 0) != expected_version:
                raise ConflictError(key, expected_version, current)
            if (page := pages.append(reading, kind, value)) is not None:
                break
        if kind == "gone":
            pages.tidy(page, keep=0)
        else:
            pages.tidy(page)
        return page

    def _take(self, key: str, value: bytes, ttl_s: float) -> FileLease | None:
        terms = self.terms(key)
        reading = terms.latest()
        page = reading.page
        if page is not None and page.kind == "held" and not self._is_silent(key, terms, page):
            return None
        payload = f"{ttl_s!r}\n".encode() + value
        taken = self.link_term(terms, reading, payload)
        return FileLease(self, key, payload, ttl_s, taken) if taken is not None else None

    def link_term(self, terms: Pages, reading: PageReading, payload: bytes) -> _TakenTerm | None:
        """Link the term after `reading`, with its first beat; None if another process did."""
        begun_s = self.clock()
        page = terms.append(reading, "held", payload)
        if page is None:
            return None
        self.beat(terms, page, 1)
        terms.tidy(page)
        return _TakenTerm(page.number, begun_s)

    def free_term(self, key: str, term: int) -> None:
        """Link a free term after `term`, if that is the latest."""
        terms = self.terms(key)
        reading = terms.latest()
        if reading.page is not None and reading.page.number == term:
            terms.append(reading, "free", b"")

    def beat(self, terms: Pages, page: FolderPage, count: int) -> None:
        """Write the holder's heartbeat."""
        self.on_step("beat")
        terms.write_beside(_beat_name(page), f"{count:0{_BEAT_BYTES}d}".encode())

    def _holder(self, key: str) -> Holder | None:
        terms = self.terms(key)
        page = terms.latest().page
        if page is None or page.kind != "held" or self._is_silent(key, terms, page):
            return None
        return Holder(page.value.partition(b"\n")[2], page.number)

    def _is_silent(self, key: str, terms: Pages, page: FolderPage) -> bool:
        """Rule 3: whether `page`'s heartbeat has stood still for its holder's ttl."""
        begun = self.clock()
        content = _read_beat(terms, page)
        seen = self._sightings.get(key)
        if seen is None or seen.nonce != page.nonce or seen.content != content:
            self._sightings[key] = _Sighting(page.nonce, content, self.clock())
            return False
        return begun - seen.seen_s >= float(page.value.partition(b"\n")[0])

    def _check_identity(self) -> None:
        """Check that this is the folder with which the store began; the first call marks it."""
        pages = Pages(Path("@identity"), self._root, self._hooks())
        if self._identity is not None:
            try:
                if pages.read(self._identity.number) == self._identity:
                    return
            except (FileNotFoundError, NotADirectoryError) as error:
                raise _folder_changed(self.folder) from error
            raise _folder_changed(self.folder)
        make_folders(self.folder, 0o700)
        self._root.check()
        reading = pages.latest()
        if reading.page is None:
            pages.append(reading, "identity", b"")
            reading = pages.latest()
        self._identity = reading.page

    def _hooks(self) -> Hooks:
        until_s = getattr(self._running, "until_s", self.clock() + self.timeout_s)

        def guard() -> None:
            if self.clock() >= until_s:  # the caller already has its TimeoutError: do not write now
                raise _hangs(self.folder, self.timeout_s)

        return Hooks(on_step=self.on_step, on_skip=self._skip, guard=guard)

    def _skip(self, path: Path, why: str) -> None:
        if path not in self._skipped and len(self._skipped) < _SKIPS_NAMED_MAX:
            self._skipped.add(path)
            _log.warning("file store: %s is skipped: %s [store-file-skipped]", path, why)


class FileLease(HeldLease):
    """A lease of a FileStore; the store makes it. `payload` is what its terms hold."""

    def __init__(
        self, store: FileStore, key: str, payload: bytes, ttl_s: float, taken: _TakenTerm
    ) -> None:
        super().__init__(key, ttl_s, store.clock, term=taken.term, begun_s=taken.begun_s)
        self._store = store
        self._payload = payload
        self._beats = 1

    async def renew(self) -> None:
        """See Lease.renew."""
        await self._store.run(self._renew)

    async def end(self) -> None:
        """See HeldLease.end."""
        await self._store.end_lease(self._key, self.term)

    def _renew(self) -> None:
        terms, begun = self._store.terms(self._key), self._store.clock()
        reading = terms.latest()
        if self._lost or reading.page is None or reading.page.number != self.term:
            raise self._deposed(reading)
        if self.held():
            self._beats += 1
            self._store.beat(terms, reading.page, self._beats)
            if self.held():  # rule 4: it was in time for every reader
                self.count_from(begun)
                return
        taken = self._store.link_term(terms, reading, self._payload)
        if taken is None:
            raise self._deposed(terms.latest())
        self._term = taken.term
        self._beats = 1
        self.count_from(taken.begun_s)

    def _deposed(self, reading: PageReading) -> LeaseLostError:
        found = f"term {reading.page.number}" if reading.page else "no term at all"
        return self.deposed(found, f"folder {self._store.folder}")


def _below(key: str) -> Path:
    return Path(*check_key(key).split("/"))


def _beat_name(page: FolderPage) -> str:
    return f"beat.{page.number:018d}"


def _read_beat(terms: Pages, page: FolderPage) -> bytes:
    """Return the heartbeat; only whether it changes matters, so any content will do."""
    try:
        return terms.read_beside(_beat_name(page), 4 * _BEAT_BYTES)
    except FileNotFoundError:
        return b""
    except ValueError:
        return b"?"


def _entry(reading: PageReading) -> Entry | None:
    page = reading.page
    return Entry(page.value, page.number) if page is not None and page.kind == "value" else None


def _trouble(folder: Path, error: OSError) -> StoreError:
    """Return the StoreError for `error`, which was met below `folder`."""
    path = error.filename or folder
    return StoreError(
        f"file store: {path}: {error.strerror or error}",
        slug="store-unreachable",
        where=f"folder {folder}",
        expected="a folder that every node of the job can read and write",
        next_step=_NEXT_STEPS.get(error.errno or 0, f"look at {folder} on this node"),
    )


def _folder_changed(folder: Path) -> StoreError:
    """Return the StoreError for a folder that is no longer the one that was opened."""
    return StoreError(
        f"file store: {folder} is not the folder it was: deleted, replaced or unmounted",
        slug="store-folder-gone",
        expected="the folder with which this job began, for as long as it runs",
        next_step=f"restore or mount {folder}; the job continues by itself",
    )


def _hangs(folder: Path, timeout_s: float) -> StoreError:
    """Return the StoreError for a folder that does not answer."""
    return StoreError(
        f"file store: {folder} did not answer within {timeout_s:g} s",
        slug="store-timeout",
        next_step=f"look at the server of the file system that {folder} is on",
    )


def _check_folder(place: StorePlace, environ: Mapping[str, str]) -> StorePlace:
    path = Path(place.endpoint).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ConfigurationError(
            f"--rdzv-endpoint {place.endpoint} is no folder",
            slug="endpoint-missing",
            expected="a folder that all nodes share, which may not exist yet",
        )
    return StorePlace(str(path), place.conf)


BACKEND = StoreBackend(
    name="file",
    make=lambda place: FileStore(Path(place.endpoint).expanduser().absolute()),
    endpoint="a folder that all nodes share",
    example="/shared/folder",
    check=_check_folder,
    forgets=False,
)
