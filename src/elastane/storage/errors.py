"""Maps errors of a checkpoint place to StorageError, with a next step for each."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from elastane.errors import StorageError

_NEXT_STEPS = {
    errno.ENOSPC: "free space there, or keep fewer checkpoints; the next save tries again",
    errno.EDQUOT: "free space within this user's quota; the next save tries again",
    errno.EROFS: "mount that file system for writing on this node",
    errno.EACCES: "let this user read and write there",
    errno.EPERM: "let this user read and write there",
    errno.ENOENT: "create the folder, or mount its file system on this node",
    errno.ENOTDIR: "name a folder, not a file",
    errno.ESTALE: "mount that file system again on this node, as it was when the job began",
    errno.EIO: "look at the health of that file system and its server",
    errno.EREMOTEIO: "look at what the object store and its credentials say",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def storage_error(where: str, error: OSError) -> StorageError:
    """Return the StorageError for an OSError at `where`."""
    path = error.filename or where
    return StorageError(
        f"checkpoints at {where}: {path}: {error.strerror or error}",
        slug="storage-unreachable",
        expected="a place that can be read, and written to for saving",
        next_step=_NEXT_STEPS.get(error.errno or 0, f"look at {where} from this node"),
    )


@contextlib.contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Turn OSError into StorageError within a with statement."""
    try:
        yield
    except OSError as error:
        raise storage_error(where, error) from error
