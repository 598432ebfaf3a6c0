"""Checkpoints in an object store, or any other place for which fsspec has a client.

Owns the differences from a folder. Objects appear whole at the end of their upload, and nothing is
renamed. Creating an object only if it does not exist is the server's conditional put
(`If-None-Match` on S3, `ifGenerationMatch` on GCS, no overwriting on Azure). In a store without it
a second put may replace the first. The protocol still holds, since all writers that may create an
object write the same bytes.

Clients cache listings; each operation here invalidates them. How it fails: OSError, also for the
client's own errors. EIO becomes EREMOTEIO, because it does not concern a single object.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from elastane.errors import ConfigurationError
from elastane.protocol.checkpoints import (
    CHUNK_BYTES,
    MANIFEST,
    FileRecord,
    is_file_name,
    parse_folder,
)
from elastane.storage.digest import View, chunks, digest_of
from elastane.storage.protocol import Stop, never

PLACE = ".elastane-place"
# One part of an upload: S3 accepts 10,000 parts, which is enough for files of 640 GB.
_UPLOAD_BYTES = 4 * CHUNK_BYTES
# The clients' names for the time at which an object was written.
_WHEN = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")


def open_objects(url: str) -> ObjectStorage:
    """Open the place of a URL; raises ConfigurationError if no client is installed for it."""
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as missing:
        raise _no_client(url, "fsspec", "pip install 'elastane[objects]'") from missing
    try:
        # A new client: a cached one may have other credentials or old listings.
        client, root = url_to_fs(url, skip_instance_cache=True)
    except ImportError as missing:
        raise _no_client(url, str(missing), "pip install s3fs, gcsfs or adlfs") from missing
    except ValueError as error:
        raise ConfigurationError(
            f"{_without_password(url)} names no place for checkpoints: {error}",
            slug="storage-url",
            expected="a folder, file://, s3://, gs://, abfs://, or another URL that fsspec knows",
            next_step="correct the URL, or install the client that makes it known to fsspec",
        ) from error
    return ObjectStorage(client, root.rstrip("/"), _without_password(url))


class ObjectStorage:
    """See Storage. `client` is an fsspec file system, `root` a path in its notation."""

    remote = True
    readers = 8

    def __init__(self, client: Any, root: str, where: str) -> None:
        self.where = where
        self._client = client
        self._root = root
        self._place = ""

    def folders(self) -> list[str]:
        """See Storage.folders."""
        return [name for name in self._listed("") if parse_folder(name)]

    def sizes(self, folder: str, names: Iterable[str]) -> Mapping[str, int]:
        """See Storage.sizes: one listing costs less than a request for each file."""
        listed = self._listed(folder)
        found = {name: listed[name] for name in names if name in listed}
        return {name: int(one["size"]) for name, one in found.items() if one["type"] == "file"}

    def names(self, folder: str) -> list[str]:
        """See Storage.names."""
        if listed := self._listed(folder):
            return list(listed)
        raise FileNotFoundError(errno.ENOENT, "no such folder", f"{self.where}/{folder}")

    def size(self, path: str) -> int:
        """See Storage.size."""
        with self._faults(path):
            self._client.invalidate_cache(self._parent(path))
            found = self._client.info(self._full(path))
            if found["type"] != "file":
                raise OSError(errno.ELOOP, "not an object", path)
            return int(found["size"])

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """See Storage.read."""
        end = None if size is None else offset + size
        try:
            with self._faults(path):
                return bytes(self._client.cat_file(self._full(path), start=offset, end=end))
        except FileNotFoundError:
            raise
        except OSError:
            # Some stores report an error for a range that begins at the end of an object.
            if self.size(path) <= offset:
                return b""
            raise

    def open_local(self, path: str) -> None:
        """See Storage.open_local."""

    def write(self, path: str, regions: Iterable[View], stop: Stop = never) -> FileRecord:
        """See Storage.write: an object exists once its upload is complete."""
        _, _, name = path.rpartition("/")
        with self._faults(path):
            if self._client.exists(self._full(path)):
                raise FileExistsError(errno.EEXIST, "exists already", path)
            file = self._client.open(self._full(path), "wb", block_size=_UPLOAD_BYTES)
            written = False
            try:
                size_bytes, digests = _sent(regions, file.write, stop)
                file.close()
                if (found := self.size(path)) != size_bytes:
                    raise OSError(errno.EREMOTEIO, f"took {found} of {size_bytes} bytes", path)
                written = True
            finally:
                if not written:
                    self._discard(file, path)
        return FileRecord(name, size_bytes, tuple(digests))

    def create(self, path: str, content: bytes) -> bool:
        """See Storage.create: true also if the same content was there."""
        try:
            with self._faults(path):
                self._put_new(self._full(path), content)
                return True
        except OSError as error:
            # It may exist nevertheless: the client retried after a lost reply and found its own
            # object, or another writer created the same one at the same time.
            with contextlib.suppress(FileNotFoundError):
                return self.read(path) == content
            raise error

    def make_durable(self, folder: str) -> None:
        """See Storage.make_durable: an object is durable once it can be read."""

    def remove(self, folder: str) -> None:
        """See Storage.remove."""
        with contextlib.suppress(FileNotFoundError), self._faults(folder):
            with contextlib.suppress(FileNotFoundError):
                self._client.rm_file(self._full(f"{folder}/{MANIFEST}"))
            self._client.invalidate_cache(self._full(folder))
            self._client.rm(self._full(folder), recursive=True)

    def changed_s(self, folder: str) -> float:
        """See Storage.changed_s."""
        files = {name: one for name, one in self._listed(folder).items() if one["type"] == "file"}
        if not files:
            raise FileNotFoundError(errno.ENOENT, "no such folder", f"{self.where}/{folder}")
        return max(self._when(f"{folder}/{name}", one) for name, one in files.items())

    def now_s(self) -> float:
        """See Storage.now_s."""
        path = f".elastane-clock-{secrets.token_hex(8)}"
        with self._faults(path):
            self._client.pipe_file(self._full(path), b"now")
            try:
                self._client.invalidate_cache(self._root)
                return self._when(path, self._client.info(self._full(path)))
            finally:
                self._client.rm_file(self._full(path))

    def place(self) -> str:
        """See Storage.place."""
        if not self._place:
            with contextlib.suppress(FileNotFoundError):
                self._place = digest_of([self.read(PLACE)])
                return self._place
            self.create(PLACE, secrets.token_hex(16).encode())
            self._place = digest_of([self.read(PLACE)])
        return self._place

    def _put_new(self, full: str, content: bytes) -> None:
        try:
            self._client.pipe_file(full, content, mode="create")
        except (TypeError, NotImplementedError):  # A client without conditional puts.
            if self._client.exists(full):
                raise FileExistsError(errno.EEXIST, "exists already", full) from None
            self._client.pipe_file(full, content)

    def _discard(self, file: Any, path: str) -> None:
        """Remove an upload, whatever the client does when it closes the file."""
        with contextlib.suppress(Exception):  # The first fault is the one to report.
            file.discard()
        with contextlib.suppress(AttributeError):
            file.closed = True
        with contextlib.suppress(Exception):
            self._client.rm_file(self._full(path))

    def _listed(self, folder: str) -> dict[str, dict[str, Any]]:
        full = self._full(folder) if folder else self._root
        try:
            with self._faults(folder):
                self._client.invalidate_cache(full)
                found = self._client.ls(full, detail=True)
        except FileNotFoundError:
            return {}
        return {one["name"].rstrip("/").rpartition("/")[2]: one for one in found}

    def _when(self, path: str, entry: Mapping[str, Any]) -> float:
        found = next((entry[word] for word in _WHEN if entry.get(word)), None)
        if found is None:
            with self._faults(path):
                found = self._client.modified(self._full(path))
        if isinstance(found, str):
            found = datetime.fromisoformat(found)
        return found.timestamp() if isinstance(found, datetime) else float(found)

    def _full(self, path: str) -> str:
        parts = path.split("/")
        if len(parts) > 2 or not all(map(is_file_name, parts)):
            raise ValueError(f"{path!r} is no path of a file here")
        return f"{self._root}/{path}"

    def _parent(self, path: str) -> str:
        return self._full(path).rpartition("/")[0]

    @contextlib.contextmanager
    def _faults(self, path: str) -> Iterator[None]:
        """Turn a client's exceptions into OSError."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EIO, None) or isinstance(
                error, FileNotFoundError | FileExistsError | TimeoutError
            ):
                raise
            raise OSError(errno.EREMOTEIO, str(error) or type(error).__name__, path) from error
        except (ValueError, TypeError, AssertionError):
            raise  # A bug of ours, or a wrongly named place.
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise OSError(errno.EREMOTEIO, text, path) from error


def _sent(
    regions: Iterable[View], send: Callable[[memoryview], object], stop: Stop
) -> tuple[int, list[str]]:
    size_bytes, digests = 0, []
    for pieces in chunks(regions):
        if stop():
            raise OSError(errno.ECANCELED, "stopped")
        digests.append(digest_of(pieces))
        for piece in pieces:
            send(piece)
            size_bytes += len(piece)
    return size_bytes, digests


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user.partition(':')[0]}@{host}").geturl()


def _no_client(url: str, missing: str, next_step: str) -> ConfigurationError:
    return ConfigurationError(
        f"checkpoints at {_without_password(url)} need a client that is not installed: {missing}",
        expected="fsspec, and the package that knows this kind of URL",
        next_step=next_step,
        slug="extra-missing",
    )
