"""What the errors of a shared folder's file system mean, and what to do about each."""

from __future__ import annotations

import errno
from pathlib import Path

from elastane.errors import StoreError

_NEXT_STEPS = {
    errno.ENOSPC: "free space on that file system; the job goes on by itself",
    errno.EDQUOT: "free space within this user's quota; the job goes on by itself",
    errno.EROFS: "mount that file system for writing on this node",
    errno.EACCES: "let this user read, write and search that folder",
    errno.EPERM: "let this user write there, on a file system that has hard links",
    errno.ENOTSUP: "choose a folder on a file system that has hard links",
    errno.EMLINK: "choose a folder on a file system that has hard links",
    errno.ENOENT: "restore the folder, or mount its file system on this node",
    errno.ENOTDIR: "name a folder, not a file",
    errno.ESTALE: "mount that file system anew on this node",
    errno.EIO: "look at the health of that file system and its server",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def trouble(folder: Path, error: OSError) -> StoreError:
    """Return the StoreError for `error`, which was met below `folder`."""
    path = error.filename or folder
    return StoreError(
        f"file store: {path}: {error.strerror or error}",
        slug="store-unreachable",
        where=f"folder {folder}",
        expected="a folder that every node of the job can read and write",
        next_step=_NEXT_STEPS.get(error.errno or 0, f"look at {folder} on this node"),
    )


def folder_changed(folder: Path) -> StoreError:
    """Return the StoreError for a folder that is no longer the one that was opened."""
    return StoreError(
        f"file store: {folder} is not the folder it was: deleted, replaced or unmounted",
        slug="store-folder-gone",
        expected="the folder with which this job began, for as long as it runs",
        next_step=f"restore or mount {folder}; the job goes on by itself",
    )


def hangs(folder: Path, timeout_s: float) -> StoreError:
    """Return the StoreError for a folder that does not answer."""
    return StoreError(
        f"file store: {folder} did not answer within {timeout_s:g} s",
        slug="store-timeout",
        next_step=f"look at the server of the file system that {folder} is on",
    )
