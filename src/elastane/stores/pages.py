"""Numbered, immutable, checksummed files in a folder that several machines share, NFS included.

Owns how a page comes into being and which one counts. A page is written to a temporary file,
flushed to disk, and then given its number by link(2), which exactly one of several writers can
do, on NFS too (no lock is used: those NFS may lose). So no reader ever sees half a page that
was written here, whatever step its writer was killed at. The highest complete page counts;
what is torn, foreign or garbage is skipped and named once, never overwritten.

Each page names the page before it. That is how a writer that was stopped for long between
looking and linking can tell that it linked into a gap which pruning had left (nobody ever saw
that page: a higher one existed) from a link that took effect.

Folders are opened anew for each listing and files for each read, since an open is what makes an
NFS client ask the server (close-to-open); mounts with `nocto` or `actimeo` can delay what is
seen, never who wins. How it fails: OSError, told by `trouble`; StoreError where the outcome of
a write is unknown. All of it blocks: callers run it off the event loop.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastane.core.limits import STORE_VALUE_BYTES_MAX
from elastane.errors import StoreError

_PAGE = re.compile(r"\d{18}")
_OTHERS = re.compile(r"(?P<kind>tmp|beat)\.(?P<number>\d{18})(\.[0-9a-f]+)?")
_HEADER_BYTES_MAX = 512
_RESCANS_MAX = 100
# Pages kept behind the newest: as many writes may pass while a reader is between listing the
# folder and opening the page, before it has to list again.
_PAGES_KEPT = 8


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One page. `nonce` tells writers apart, `before` is the nonce of the page it follows."""

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


class Reading(msgspec.Struct, frozen=True):
    """What a folder holds: the page that counts, and the highest number that is in use."""

    page: Page | None
    top: int


@dataclass(frozen=True)
class Hooks:
    """What an operation is watched by.

    `on_step` is told of each step of a write (tests kill the process there), `on_skip` of each
    file that is passed over and why, `guard` is called before a write takes effect and may
    raise: the caller has gone away meanwhile.
    """

    on_step: Callable[[str], None]
    on_skip: Callable[[Path, str], None]
    guard: Callable[[], None]


class Pages:
    """The pages of one folder, which need not exist yet."""

    def __init__(self, path: Path, root: Path, hooks: Hooks) -> None:
        self.path = path
        self._root = root
        self._hooks = hooks

    def latest(self) -> Reading:
        """Return the page that counts."""
        for _ in range(_RESCANS_MAX):
            numbers = sorted(self._numbers(), reverse=True)
            with contextlib.suppress(FileNotFoundError):  # pruned since the listing: list again
                for number in numbers:
                    if (page := self.read(number)) is not None:
                        return Reading(page, numbers[0])
                return Reading(None, numbers[0] if numbers else 0)
        raise StoreError(
            f"file store: {self.path} changed {_RESCANS_MAX} times during a read",
            slug="store-busy",
        )

    def read(self, number: int) -> Page | None:
        """Return a page, None where its file is not one. Raises FileNotFoundError."""
        path = self._file(number)
        try:
            content = read_plain(path, STORE_VALUE_BYTES_MAX + _HEADER_BYTES_MAX)
            return _decode(content, number)
        except ValueError as error:
            self._hooks.on_skip(path, str(error))
            return None

    def append(self, base: Reading, kind: str, value: bytes) -> Page | None:
        """Write the page after `base` durably; None where somebody else did."""
        before = base.page.nonce if base.page else "-"
        page = Page(
            number=base.top + 1, kind=kind, nonce=secrets.token_hex(8), before=before, value=value
        )
        make_private(self.path, self._root)
        temp = self.path / f"tmp.{page.number:018d}.{page.nonce}"
        try:
            self._write(temp, page.encode())
            self._hooks.guard()
            linked = self._link(temp, page)
        finally:
            with contextlib.suppress(OSError):  # the next page that is written removes it
                temp.unlink()
        if not linked:
            return None
        self._hooks.on_step("linked")
        # At once: during the flush, others may write more pages than are kept.
        if not self._took_effect(page):
            return None
        sync_folder(self.path)
        self._hooks.on_step("durable")
        return page

    def tidy(self, page: Page, keep: int = _PAGES_KEPT) -> None:
        """Remove what `page` has made obsolete.

        A temporary file for this number or a lower one belongs to a writer that is dead, or
        about to lose; without it, it can only lose.
        """
        doomed = [name for name in self._names() if _is_obsolete(name, page.number, keep)]
        for name in doomed:
            with contextlib.suppress(OSError):  # somebody else tidies too; else the next time
                (self.path / name).unlink()

    def _write(self, temp: Path, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temp, flags, 0o600)
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

    def _link(self, temp: Path, page: Page) -> bool:
        try:
            os.link(temp, self._file(page.number), follow_symlinks=False)
        except (FileExistsError, FileNotFoundError):
            # NFS may have done the link, lost the reply, and refused the request's repetition.
            with contextlib.suppress(FileNotFoundError):
                found = self.read(page.number)
                return found is not None and found.nonce == page.nonce
            return False
        return True

    def _took_effect(self, page: Page) -> bool:
        if max(self._numbers(), default=0) <= page.number:
            return True
        with contextlib.suppress(FileNotFoundError):
            after = self.read(page.number + 1)
            if after is not None and after.before == page.nonce:
                return True
            if after is not None:
                self._file(page.number).unlink(missing_ok=True)
                return False
        raise StoreError(
            f"file store: {self._file(page.number)} was overtaken while it was written, "
            "and may or may not have counted",
            slug="store-unsure",
        )

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.path) as found:
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

    def _file(self, number: int) -> Path:
        return self.path / f"{number:018d}"


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


def _decode(content: bytes, number: int) -> Page:
    """Return the page in `content`; raise ValueError that says what is wrong with it."""
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
    return Page(number=number, kind=kind, nonce=nonce, before=before, value=value)


def read_plain(path: Path, bytes_max: int) -> bytes:
    """Return the content of a plain file; ValueError where it is none, or too large."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would block
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            raise ValueError("not a plain file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a plain file")
        content = bytearray()
        while piece := os.read(descriptor, 1 << 20):
            content += piece
            if len(content) > bytes_max:
                raise ValueError(f"more than {bytes_max} bytes")
        return bytes(content)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of `content`."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(path: Path, root: Path) -> None:
    """Create `path` and what is missing between it and `root`, for this user alone."""
    if path.is_dir():
        return
    if path != root:
        make_private(path.parent, root)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            sync_folder(path.parent)
