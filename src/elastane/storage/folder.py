"""Checkpoints in a folder, of one host or shared over NFS and the like.

Owns how files come into being. Files are created under their final names and never replaced; a file
that must appear atomically is linked. Every path is opened relative to the folder without following
symbolic links, so that another writer there cannot make elastane read or remove other files.

A marker file detects that the folder is now a different one (unmounted or replaced). Hence nothing
is written below an empty mount point, and no job starts from zero because its checkpoints seem
gone. Each operation opens the folders again, which makes an NFS client ask its server. How it
fails: OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from elastane.process.files import make_folders, write_all
from elastane.protocol.checkpoints import MANIFEST, FileRecord, is_file_name, parse_folder
from elastane.storage.aligned import AlignedFile
from elastane.storage.digest import View, digest_of
from elastane.storage.protocol import Stop, never

PLACE = ".elastane-place"
_PLACE_BYTES_MAX = 4096
_PLACE_CHARS = 32
# A marker that stays shorter than this was damaged; its content is used as it is.
_PLACE_WAIT_S = 2.0
_PLACE_POLL_S = 0.01
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, a FIFO placed there would block the open forever.
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# The errors of a file system without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
# The errors of a file system that cannot be written.
_NO_WRITING = {errno.EROFS, errno.EACCES, errno.EPERM}
# The errors of rmdir if a file was created just now, or NFS still hides one.
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}


class FolderStorage:
    """See Storage. Nothing is read or made before the first operation."""

    remote = False
    readers = 4

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._root = folder
        self._place = ""  # The digest of the marker file.
        self._has_links = True  # Until one could not be made.

    def folders(self) -> list[str]:
        """See Storage.folders."""
        try:
            with self._opened() as at, os.scandir(at) as found:
                return [
                    entry.name
                    for entry in found
                    if parse_folder(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            if self._place:
                raise self._changed() from None
            return []

    def sizes(self, folder: str, names: Iterable[str]) -> Mapping[str, int]:
        """See Storage.sizes."""
        sizes = {}
        with self._opened(folder) as at:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(_plain_name(name), dir_fd=at, follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        sizes[name] = found.st_size
        return sizes

    def names(self, folder: str) -> list[str]:
        """See Storage.names."""
        with self._opened(folder) as at:
            return _names(at)

    def size(self, path: str) -> int:
        """See Storage.size."""
        with self._reading(path) as descriptor:
            return os.fstat(descriptor).st_size

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """See Storage.read."""
        with self._reading(path) as descriptor:
            there = max(0, os.fstat(descriptor).st_size - offset)
            rest = there if size is None else min(size, there)
            pieces = []
            while rest and (piece := os.pread(descriptor, rest, offset)):
                pieces.append(piece)
                offset, rest = offset + len(piece), rest - len(piece)
            return b"".join(pieces)

    def open_local(self, path: str) -> int:
        """See Storage.open_local."""
        folder, name = _split(path)
        with self._opened(folder) as at:
            try:
                descriptor = os.open(name, _OLD, dir_fd=at)
            except OSError as error:
                if error.errno == errno.ENXIO:  # A socket.
                    raise _no_file(path) from error
                raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _no_file(path)
        return descriptor

    def write(self, path: str, regions: Iterable[View], stop: Stop = never) -> FileRecord:
        """See Storage.write."""
        folder, name = _split(path)
        self._ready()
        with self._opened(folder, make=True) as at:
            file = AlignedFile(at, name, stop)
            written = False
            try:
                digests = file.fill(regions)
                os.fsync(at)
                written = True
            finally:
                file.close(keep=written)
            return FileRecord(name, file.size_bytes, digests)

    def create(self, path: str, content: bytes) -> bool:
        """See Storage.create: atomic on every file system with hard links."""
        self._ready()
        return self._create(path, content)

    def make_durable(self, folder: str) -> None:
        """See Storage.make_durable."""
        with self._opened() as root:
            # Retention may have removed the folder, since newer ones are there.
            with contextlib.suppress(FileNotFoundError), self._opened(folder) as at:
                if not self._has_links:
                    _sync_records(at)
                os.fsync(at)
            os.fsync(root)

    def remove(self, folder: str) -> None:
        """See Storage.remove."""
        with self._opened() as root:
            try:
                at = os.open(_plain_name(folder), _FOLDER | os.O_NOFOLLOW, dir_fd=root)
            except FileNotFoundError:
                return
            try:
                _unlink(at, MANIFEST)
                os.fsync(at)
                for name in _names(at):
                    _unlink(at, name)
            finally:
                os.close(at)
            try:
                os.rmdir(folder, dir_fd=root)
            except OSError as error:
                if error.errno not in {*_NOT_EMPTY, errno.ENOENT}:
                    raise
            os.fsync(root)

    def changed_s(self, folder: str) -> float:
        """See Storage.changed_s."""
        with self._opened(folder) as at:
            times = [os.fstat(at).st_mtime]
            for name in _names(at):
                with contextlib.suppress(FileNotFoundError):
                    times.append(os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime)
            return max(times)

    def now_s(self) -> float:
        """See Storage.now_s: the clock of an NFS folder is its server's."""
        self._ready()
        name = _temporary()
        with self._opened() as at:
            descriptor = os.open(name, _NEW, 0o600, dir_fd=at)
            try:
                write_all(descriptor, b"now")
                os.fsync(descriptor)
                return os.fstat(descriptor).st_mtime
            finally:
                os.close(descriptor)
                os.unlink(name, dir_fd=at)

    def place(self) -> str:
        """See Storage.place: the digest of the marker file, so that any content is an id.

        If no marker can be created, as on a read-only mount, it is the digest of the checkpoints'
        names. These are random, so that two nodes that see the same names share the place.
        """
        if not self._place:
            try:
                make_folders(self._root)
                self._create(PLACE, secrets.token_hex(_PLACE_CHARS // 2).encode())
            except OSError as error:
                names = sorted(self.folders())
                if error.errno not in _NO_WRITING or not names:
                    raise
                return self._place or digest_of([name.encode() for name in names])
        deadline_s = time.monotonic() + _PLACE_WAIT_S
        while True:
            with self._opened() as at:
                # Without hard links, the marker may have been created and not yet filled.
                if not self._place and time.monotonic() > deadline_s:
                    self._place = digest_of([_place_in(at)])
                if self._place:
                    return self._place
            time.sleep(_PLACE_POLL_S)

    def _ready(self) -> None:
        if not self._place:
            self.place()

    @contextlib.contextmanager
    def _opened(self, folder: str = "", *, make: bool = False) -> Iterator[int]:
        """Open the place, or a folder in it, for a with statement."""
        root = os.open(self._root, _FOLDER)
        at = -1
        try:
            self._check(root)
            if folder and make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(_plain_name(folder), dir_fd=root)
                    os.fsync(root)
            if folder:
                at = os.open(_plain_name(folder), _FOLDER | os.O_NOFOLLOW, dir_fd=root)
            yield at if folder else root
        finally:
            for descriptor in (at, root):
                if descriptor >= 0:
                    os.close(descriptor)

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[int]:
        descriptor = self.open_local(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _check(self, root: int) -> None:
        """Raise if the place has become another one; remember which it is."""
        known = self._place  # Read before the file, since another thread may set it meanwhile.
        content = _place_in(root)
        found = digest_of([content])
        if known and found != known:
            raise self._changed()
        if len(content) >= _PLACE_CHARS:
            self._place = found

    def _changed(self) -> OSError:
        what = "is not the same folder as before: removed, replaced or unmounted"
        return OSError(errno.ESTALE, what, self.where)

    def _create(self, path: str, content: bytes) -> bool:
        folder, name = _split(path)
        # A manifest must not create its folder, which may have been removed by now.
        with self._opened(folder, make=name != MANIFEST) as at:
            temporary = _temporary()
            descriptor = os.open(temporary, _NEW, 0o666, dir_fd=at)
            try:
                write_all(descriptor, content)
                os.fsync(descriptor)
                made = self._link(at, temporary, name, descriptor)
                made = made or _create_file(at, name, content)
            finally:
                os.close(descriptor)
                with contextlib.suppress(OSError):  # Otherwise it is litter that is never read.
                    os.unlink(temporary, dir_fd=at)
            os.fsync(at)
            return made

    def _link(self, at: int, temporary: str, name: str, descriptor: int) -> bool:
        """Link a file to its name; returns False if the name is taken or links are unsupported."""
        try:
            os.link(temporary, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
        except FileExistsError:
            # NFS may have linked it, lost the reply, and refused the repeated request.
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=at, follow_symlinks=False)
                return os.path.samestat(found, os.fstat(descriptor))
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._has_links = False
            return False
        return True


def _place_in(at: int) -> bytes:
    try:
        descriptor = os.open(PLACE, _OLD, dir_fd=at)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(descriptor, _PLACE_BYTES_MAX, 0)
    finally:
        os.close(descriptor)


def _names(at: int) -> list[str]:
    with os.scandir(at) as found:
        return [entry.name for entry in found]


def _create_file(at: int, name: str, content: bytes) -> bool:
    """Create a file under its name unless it exists; its digest detects a partial one."""
    try:
        descriptor = os.open(name, _NEW, 0o666, dir_fd=at)
    except FileExistsError:
        return False
    try:
        write_all(descriptor, content)
        os.fsync(descriptor)
    except BaseException:
        os.unlink(name, dir_fd=at)
        raise
    finally:
        os.close(descriptor)
    return True


def _sync_records(at: int) -> None:
    """Make records durable that were written under their own names."""
    for name in _names(at):
        if name.endswith(".json"):
            descriptor = os.open(name, _OLD, dir_fd=at)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _split(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return (_plain_name(folder) if folder else ""), _plain_name(name)


def _plain_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError(f"{name!r} is no name of a file")
    return name


def _temporary() -> str:
    return f".new-{secrets.token_hex(8)}"


def _no_file(path: str) -> OSError:
    return OSError(errno.ELOOP, "not a plain file", path)


def _unlink(at: int, name: str) -> None:
    # Folders are not made by elastane: one stays, and with it its parent.
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=at)
