"""The meaning of file system errors in a shared folder, with the next step for each."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from elastane.errors import ConfigurationError, StoreError

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
        next_step=f"restore or mount {folder}; the job continues by itself",
    )


def hangs(folder: Path, timeout_s: float) -> StoreError:
    """Return the StoreError for a folder that does not answer."""
    return StoreError(
        f"file store: {folder} did not answer within {timeout_s:g} s",
        slug="store-timeout",
        next_step=f"look at the server of the file system that {folder} is on",
    )


def open_to_all(folder: Path, mode: int) -> ConfigurationError:
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


def foreign(path: Path, uid: int, root: Path) -> ConfigurationError:
    """Return the error for a file of another user where the pages of a job belong."""
    return ConfigurationError(
        f"file store: {path}{' is a link that' * path.is_symlink()} belongs to user {uid}, and this"
        f" process is user {os.geteuid()}",
        slug="store-owner",
        where=f"folder {root}",
        expected="folders and pages that this user made: what is in them commands the job",
        next_step="name a folder of this user's own as --rdzv-endpoint; or, if no job uses it,"
        f" rm -r {path}",
    )


def damaged(path: Path, why: str) -> StoreError:
    """Return the error for an unreadable newest page; older pages must not count."""
    return StoreError(
        f"file store: {path} cannot be read: {why}",
        slug="store-page-damaged",
        expected="the newest page of a key; an older one is of a state that the job has left",
        next_step="look at the health of that file system; then end the job's agents and start it"
        " with another --rdzv-id",
    )
