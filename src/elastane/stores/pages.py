"""Numbered, immutable, checksummed files in a folder that several machines share, NFS included.

Owns how a page is made and which one counts. A page is written to a temporary file, flushed to
disk, and then gets its number by link(2), which exactly one of several writers can do, also on NFS
(no lock is used: NFS may lose those). So no reader sees half a page, whatever step its writer was
killed at. The highest complete page counts. Torn and foreign files are skipped and logged once,
never overwritten.

Each page names the page before it. A writer may be stopped for long between looking and linking,
and then link into a gap that pruning had left. No reader saw that page, since a higher one existed;
the name of the page before tells this case from a link that took effect.

A page commands the job. So it counts only in folders, and as a file, of this user or root: a user
who may write to the folder of a store must not be able to plant pages.

Folders are opened for each listing and files for each read, since an open makes an NFS client ask
the server (close-to-open). Mounts with `nocto` or `actimeo` can delay what is seen, never decide
which writer wins. It fails with OSError, which the store turns into its error, and with
StoreError where the outcome of a write is unknown. Every call blocks: callers use a thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastane.errors import ConfigurationError, StoreError
from elastane.process.files import write_all
from elastane.stores.protocol import STORE_VALUE_BYTES_MAX

_PAGE = re.compile(r"\d{18}")
_OTHERS = re.compile(r"(?P<kind>tmp|beat)\.(?P<number>\d{18})(\.[0-9a-f]+)?")
_HEADER_BYTES_MAX = 512
_RESCANS_MAX = 100
# Pages kept besides the newest: as many writes may pass while a reader is between listing the
# folder and opening the page, before it has to list again.
_PAGES_KEPT = 8
# A file server that answers so, or not at all, may have made the link.
_IN_DOUBT = {errno.EIO, errno.ETIMEDOUT}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT_UID = 0
# Folders of which one process remembers that they are durable: some for each key of a job.
_DURABLE_MAX = 4096


class FolderPage(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a key, or one term of a lease: the content of a numbered file.

    `nonce` is its writer's own; `before` is the nonce of the page it follows.
    """

    number: int
    kind: str
    nonce: str
    before: str
    value: bytes

    def encode(self) -> bytes:
        """Return the file's content."""
        head = f"elastane-page 1 {self.kind} {self.number} {self.nonce} {self.before}"
        head = f"{head} {len(self.value)}"
        return f"{head} {_digest(head, self.value)}\n".encode() + self.value


class PageReading(msgspec.Struct, frozen=True):
    """A folder's content: the page that counts, and the highest number in use."""

    page: FolderPage | None
    top: int


@dataclass(frozen=True)
class Hooks:
    """The observers of an operation.

    `on_step` gets each step of a write (tests kill the process there), `on_skip` each file that
    is skipped and why. `guard` runs before a write takes effect; it raises where the caller has
    given up meanwhile.
    """

    on_step: Callable[[str], None]
    on_skip: Callable[[Path, str], None]
    guard: Callable[[], None]


class Root:
    """The folder of a store, and the rule which owners of files count in it.

    They are this user, root, and the owner that new files of this process get: a file server may
    map users to others.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: int | None = None
        self._durable: dict[Path, str] = {}

    def check(self) -> None:
        """ConfigurationError for a folder in which other users may replace what is written."""
        with self.opened(Path()) as at:
            found = os.fstat(at)
            if found.st_mode & stat.S_IWOTH:
                raise _open_to_all(self.path, stat.S_IMODE(found.st_mode))
            # A folder that a group shares may be an administrator's.
            if not found.st_mode & stat.S_IWGRP and not self._is_ours(found.st_uid, at):
                raise _foreign(self.path, found.st_uid, self.path)

    @contextlib.contextmanager
    def opened(self, below: Path, *, make: bool = False) -> Iterator[int]:
        """Open a folder below this one, part by part and without following a link.

        ConfigurationError where a part of the path belongs to another user, or is open to all.
        """
        at, where = os.open(self.path, _FOLDER), self.path
        try:
            for part in below.parts:
                inner = self._inner(at, where, part, make=make)
                os.close(at)
                at, where = inner, where / part
                self._check_part(os.fstat(at), where, at)
            with _named(where):
                yield at
        finally:
            os.close(at)

    def _inner(self, at: int, where: Path, part: str, *, make: bool) -> int:
        with _named(where):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=at)
            try:
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
            except NotADirectoryError:
                found = os.stat(part, dir_fd=at, follow_symlinks=False)
                if stat.S_ISLNK(found.st_mode):
                    raise _foreign(where / part, found.st_uid, self.path) from None
                raise
            try:
                self.make_durable(at, where / part, str(os.fstat(inner).st_ino))
            except BaseException:
                os.close(inner)
                raise
            return inner

    def make_durable(self, at: int, path: Path, mark: str) -> None:
        """Make `path` durable, which is in the open folder, once for each mark of it.

        What this process found may not be durable: its writer may have been killed before its last
        fsync, or be about to call it.
        """
        if self._durable.get(path) == mark:
            return
        os.fsync(at)
        if len(self._durable) >= _DURABLE_MAX:
            self._durable.clear()
        self._durable[path] = mark

    def check_file(self, found: os.stat_result, at: int) -> None:
        """ValueError for a file of another user; `at` is a checked folder of the store."""
        if not self._is_ours(found.st_uid, at):
            raise ValueError(f"it belongs to user {found.st_uid}")

    def _check_part(self, found: os.stat_result, where: Path, at: int) -> None:
        if found.st_mode & stat.S_IWOTH:
            raise _open_to_all(where, stat.S_IMODE(found.st_mode))
        if not self._is_ours(found.st_uid, at):
            raise _foreign(where, found.st_uid, self.path)

    def _is_ours(self, uid: int, at: int) -> bool:
        if uid in (os.geteuid(), _ROOT_UID, self._mapped):
            return True
        if self._mapped is None:
            self._mapped = self._owner_of_new()
        return uid == self._mapped

    def _owner_of_new(self) -> int:
        """Return the owner that a new file of this process gets in the folder."""
        name = f".owner.{secrets.token_hex(8)}"
        root = os.open(self.path, _FOLDER)
        try:
            descriptor = os.open(name, _NEW, 0o600, dir_fd=root)
            try:
                return os.fstat(descriptor).st_uid
            finally:
                os.close(descriptor)
                os.unlink(name, dir_fd=root)
        except OSError:  # Nothing can be written: then nothing is mapped either.
            return os.geteuid()
        finally:
            os.close(root)


class Pages:
    """All pages of one key or lease, in a folder below `root` that need not exist yet.

    With `whole`, a damaged newest page is an error and is not skipped. An older page would take
    the job back to a state that it has left.
    """

    def __init__(self, below: Path, root: Root, hooks: Hooks, *, whole: bool = False) -> None:
        self.path = root.path / below
        self._newest = self.path / "newest"
        self._below = below
        self._root = root
        self._hooks = hooks
        self._whole = whole

    def latest(self) -> PageReading:
        """Return the page that counts, once it is durable."""
        for _ in range(_RESCANS_MAX):
            numbers = sorted(self._numbers(), reverse=True)
            with contextlib.suppress(FileNotFoundError):  # pruned since the listing: list again
                for number in numbers:
                    if (page := self.read(number)) is not None:
                        with self._opened() as at:
                            self._root.make_durable(at, self._newest, page.nonce)
                        return PageReading(page, numbers[0])
                return PageReading(None, numbers[0] if numbers else 0)
        raise StoreError(
            f"file store: {self.path} changed {_RESCANS_MAX} times during a read",
            slug="store-busy",
        )

    def read(self, number: int) -> FolderPage | None:
        """Return a page, None for a file that is no page. Raises FileNotFoundError."""
        name = _name(number)
        try:
            with self._opened() as at:
                content = self._content(at, name, STORE_VALUE_BYTES_MAX + _HEADER_BYTES_MAX)
            return _decode(content, number)
        except ValueError as error:
            if self._whole:
                raise _damaged(self.path / name, str(error)) from error
            self._hooks.on_skip(self.path / name, str(error))
            return None

    def read_beside(self, name: str, bytes_max: int) -> bytes:
        """Return the content of a small file next to the pages; ValueError for what is none."""
        with self._opened() as at:
            return self._content(at, name, bytes_max)

    def write_beside(self, name: str, content: bytes) -> None:
        """Write to a small file next to the pages, in place."""
        with self._opened() as at:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=at)
            try:
                write_all(descriptor, content)
            finally:
                os.close(descriptor)

    def append(self, base: PageReading, kind: str, value: bytes) -> FolderPage | None:
        """Write the page after `base` durably; None where another process did."""
        before = base.page.nonce if base.page else "-"
        page = FolderPage(
            number=base.top + 1, kind=kind, nonce=secrets.token_hex(8), before=before, value=value
        )
        temp = f"tmp.{page.number:018d}.{page.nonce}"
        with self._opened(make=True) as at:
            try:
                self._write(at, temp, page.encode())
                self._hooks.guard()
                linked = self._link(at, temp, page)
            finally:
                with contextlib.suppress(OSError):  # the next page that is written removes it
                    os.unlink(temp, dir_fd=at)
            if not linked:
                return None
            try:
                self._hooks.on_step("linked")
                # Immediately: during the flush, others may write more pages than are kept.
                if not self._took_effect(page):
                    return None
                self._root.make_durable(at, self._newest, page.nonce)
            except OSError as error:
                raise self._unsure(
                    page, f"may not be durable: {error.strerror or error}"
                ) from error
        self._hooks.on_step("durable")
        return page

    def tidy(self, page: FolderPage, keep: int = _PAGES_KEPT) -> None:
        """Remove what `page` has made obsolete.

        A temporary file for this number or a lower one belongs to a writer that is dead or about to
        lose; without the file it can only lose.
        """
        with contextlib.suppress(OSError):  # The page counts; the next one that is written tidies.
            doomed = [name for name in self._names() if _is_obsolete(name, page.number, keep)]
            with self._opened() as at:
                for name in doomed:
                    with contextlib.suppress(OSError):  # another process tidies too
                        os.unlink(name, dir_fd=at)

    def _opened(self, *, make: bool = False) -> contextlib.AbstractContextManager[int]:
        return self._root.opened(self._below, make=make)

    def _content(self, at: int, name: str, bytes_max: int) -> bytes:
        return read_plain(name, bytes_max, at, lambda found: self._root.check_file(found, at))

    def _write(self, at: int, temp: str, content: bytes) -> None:
        descriptor = os.open(temp, _NEW, 0o600, dir_fd=at)
        try:
            self._hooks.on_step("opened")
            half = len(content) // 2
            write_all(descriptor, content[:half])
            self._hooks.on_step("half-written")
            write_all(descriptor, content[half:])
            self._hooks.on_step("written")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._hooks.on_step("synced")

    def _link(self, at: int, temp: str, page: FolderPage) -> bool:
        try:
            name = _name(page.number)
            os.link(temp, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
        except (FileExistsError, FileNotFoundError):
            # NFS may have done the link, lost the reply, and refused the request's repetition.
            with contextlib.suppress(FileNotFoundError):
                found = self.read(page.number)
                return found is not None and found.nonce == page.nonce
            return False
        except OSError as error:
            if error.errno in _IN_DOUBT:
                raise self._unsure(page, f"may be written: {error.strerror}") from error
            raise
        return True

    def _took_effect(self, page: FolderPage) -> bool:
        if max(self._numbers(), default=0) <= page.number:
            return True
        with contextlib.suppress(FileNotFoundError):
            after = self.read(page.number + 1)
            if after is not None and after.before == page.nonce:
                return True
            if after is not None:
                with self._opened() as at, contextlib.suppress(FileNotFoundError):
                    os.unlink(_name(page.number), dir_fd=at)
                return False
        raise self._unsure(page, "was overtaken while it was written, and may not have counted")

    def _unsure(self, page: FolderPage, why: str) -> StoreError:
        return StoreError(
            f"file store: {self.path / _name(page.number)} {why}", slug="store-unsure"
        )

    def _names(self) -> list[str]:
        try:
            with self._opened() as at, os.scandir(at) as found:
                return [file.name for file in found]
        except FileNotFoundError:
            return []

    def _numbers(self) -> list[int]:
        numbers = []
        for name in self._names():
            if _PAGE.fullmatch(name):
                numbers.append(int(name))
            elif not _OTHERS.fullmatch(name) and not name.startswith(".nfs"):
                self._hooks.on_skip(self.path / name, "not a file of this store")
        return numbers


@contextlib.contextmanager
def _named(where: Path) -> Iterator[None]:
    """Let an OSError inside name the whole path of its file, which is in the folder `where`."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = str(where / error.filename)
        raise


def _name(number: int) -> str:
    return f"{number:018d}"


def _is_obsolete(name: str, number: int, keep: int) -> bool:
    if _PAGE.fullmatch(name):
        return int(name) < number - keep
    match = _OTHERS.fullmatch(name)
    if match is None:
        return False
    other = int(match["number"])
    return other <= number if match["kind"] == "tmp" else other < number


def _digest(head: str, value: bytes) -> str:
    return hashlib.sha256(head.encode() + b"\n" + value).hexdigest()


def _decode(content: bytes, number: int) -> FolderPage:
    """Return the page in `content`; ValueError names the fault."""
    line, newline, value = content.partition(b"\n")
    fields = line[:_HEADER_BYTES_MAX].decode("ascii", "replace").split(" ")
    if not newline or len(fields) != 8 or fields[:2] != ["elastane-page", "1"]:
        raise ValueError("torn or foreign: it has no header of a page")
    _, _, kind, found, nonce, before, length, digest = fields
    if found != str(number):
        raise ValueError(f"says it is page {found}")
    if length != str(len(value)):
        raise ValueError(f"truncated: {len(value)} of {length} bytes")
    if digest != _digest(" ".join(fields[:-1]), value):
        raise ValueError("its checksum does not match")
    return FolderPage(number=number, kind=kind, nonce=nonce, before=before, value=value)


def _open_to_all(folder: Path, mode: int) -> ConfigurationError:
    """Return the error for a folder in which every user may plant pages, the secret included."""
    is_shared = bool(mode & stat.S_ISVTX)  # as /tmp is, which has to stay so
    within = f"name a folder in it: --rdzv-endpoint {folder}/elastane"
    return ConfigurationError(
        f"file store: {folder} can be written by every user (mode {mode:o})",
        slug="store-folder-mode",
        expected="a folder of this user's own, or of a group. The sticky bit does not help: others"
        " could put pages there before this job does",
        next_step=within if is_shared else f"chmod o-w {folder}, or {within}",
    )


def _foreign(path: Path, uid: int, root: Path) -> ConfigurationError:
    """Return the error for a file of another user where the pages of a job belong."""
    return ConfigurationError(
        f"file store: {path}{' is a link that' * path.is_symlink()} belongs to user {uid}, and this"
        f" process is user {os.geteuid()}",
        slug="store-owner",
        where=f"folder {root}",
        expected="folders and pages that this user made, because their content commands the job",
        next_step="name a folder of this user's own as --rdzv-endpoint; or, if no job uses it,"
        f" rm -r {path}",
    )


def _damaged(path: Path, why: str) -> StoreError:
    """Return the error for an unreadable newest page; older pages must not count."""
    return StoreError(
        f"file store: {path} cannot be read: {why}",
        slug="store-page-damaged",
        expected="the newest page of a key; an older one is of a state that the job has left",
        next_step="look at the health of that file system; then end the job's agents and start it"
        " with another --rdzv-id",
    )


def read_plain(
    name: str, bytes_max: int, at: int, check: Callable[[os.stat_result], None]
) -> bytes:
    """Return the content of a plain file in an open folder.

    ValueError for another kind of file, one that is too large, or one that `check` refuses.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would block
    try:
        descriptor = os.open(name, flags, dir_fd=at)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            raise ValueError("not a plain file") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a plain file")
        check(found)
        content = bytearray()
        while piece := os.read(descriptor, 1 << 20):
            content += piece
            if len(content) > bytes_max:
                raise ValueError(f"more than {bytes_max} bytes")
        return bytes(content)
    finally:
        os.close(descriptor)
