"""Small private files of this user on this machine.

This module owns the runtime folder (mode 0700), atomic writes, names made safe for paths, the
registry of running agents that `elastane status` reads, and the slots that number agents of one job
on one machine. A killed process may leave any of these files behind: registry entries carry pid and
start time, and slots are locks that die with their process. It fails with ConfigurationError for a
folder that other users can access, and with OSError otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from elastane.errors import ConfigurationError
from elastane.protocol.limits import NAME_CHARS_MAX
from elastane.protocol.unreadable import UNREADABLE

_SLOTS_MAX = 1024
# Jobs whose folders of logs are remembered; some hundred bytes each.
LOG_PLACES_MAX = 256
_ENTRY_BYTES_MAX = 64 << 10


def safe_name(name: str) -> str:
    """Return `name` as a legal path component; a name that is one already is unchanged.

    Two different names never give the same result: a digest is added when characters are replaced
    or cut off.
    """
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) and len(name) <= NAME_CHARS_MAX:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:12]
    kept = re.sub(r"[^A-Za-z0-9_-]", "_", name)[: NAME_CHARS_MAX - 13]
    return f"{kept}-{digest}"


def runtime_folder(environ: Mapping[str, str]) -> Path:
    """Return this user's private folder on this machine; make it if it is missing."""
    uid = os.getuid()
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base and _is_private(Path(base), uid):
        path = Path(base) / "elastane"
    else:
        path = Path(environ.get("TMPDIR") or "/tmp") / f"elastane-{uid}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_private(path, uid):
        raise ConfigurationError(
            f"runtime folder {path} is not this user's alone",
            slug="runtime-folder",
            expected=f"a folder owned by uid {uid} with mode 700",
            next_step=f"rm -r {path}, or set XDG_RUNTIME_DIR or TMPDIR to a folder of your own",
        )
    return path


def _is_private(path: Path, uid: int) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o077


def write_atomic(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace `path` by a file with `content`: a reader sees the old file or the new one, whole.

    The file is not flushed to disk, because it need not survive the machine.
    """
    temp = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temp, flags, mode), "wb") as file:
            file.write(content)
        temp.replace(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


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


def make_folders(path: Path, mode: int = 0o777) -> None:
    """Make a folder with this mode, and its parents, durably.

    A folder that exists may be new, too: its maker may have been killed before it called fsync.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode if folder == path else 0o777)
    device = path.stat().st_dev
    with contextlib.suppress(PermissionError):  # From here on others have made them.
        for folder in path.parents:
            if folder.stat().st_dev != device:  # The folder below it is a mount point.
                return
            sync_folder(folder)


def process_start(pid: int) -> str:
    """Return an identity that no later process with the same pid shares; "" if there is none.

    It consists of the boot's id and the start in clock ticks since the boot, from /proc/<pid>/stat.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # the command before it may hold any character
    return "" if fields[0] in {"Z", "X"} else f"{boot}:{fields[19]}"


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One running agent, as `elastane status` finds it. `started` is wall time, for display."""

    job: str
    node: str
    endpoint: str
    token: str
    pid: int
    process: str  # process_start(pid)
    log_dir: str = ""
    started: float = 0.0

    def is_alive(self) -> bool:
        """Return whether the agent that wrote this entry still runs."""
        return bool(self.process) and process_start(self.pid) == self.process


class JobRegistry:
    """This user's agents on this machine: `jobs/<job>/<node>.json`, mode 0600.

    `logs/<job>` names the folder of logs of the newest agent of a job, also after its end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "jobs"
        self._logs = folder / "logs"

    def write(self, entry: JobEntry) -> Path:
        """Add `entry`, or replace the entry of the same job and node."""
        path = self._folder / safe_name(entry.job) / f"{safe_name(entry.node)}.json"
        content = msgspec.json.encode(entry)
        for _ in range(10):  # another agent's remove() may delete the empty folder
            # One by one, because parents=True would follow the umask.
            for folder in (self._folder.parent, self._folder, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                write_atomic(path, content)
                return path
        raise FileNotFoundError(path)

    def note_logs(self, job: str, log_dir: str) -> None:
        """Note where a job logs; of more than LOG_PLACES_MAX jobs the oldest are forgotten."""
        self._logs.mkdir(mode=0o700, exist_ok=True)
        write_atomic(self._logs / safe_name(job), os.path.abspath(log_dir).encode())  # noqa: PTH100
        noted = sorted(self._logs.iterdir(), key=_changed_s)
        for path in noted[:-LOG_PLACES_MAX]:
            path.unlink(missing_ok=True)

    def logs_of(self, job: str) -> str:
        """Return where the newest agent of a job logged; empty if none is known."""
        try:
            return (self._logs / safe_name(job)).read_text(errors="surrogateescape")
        except (OSError, ValueError):
            return ""

    def remove(self, entry: JobEntry) -> None:
        """Remove `entry`, unless another process has replaced it since."""
        path = self._folder / safe_name(entry.job) / f"{safe_name(entry.node)}.json"
        if _read_entry(path) == entry:
            _unlink(path)

    def running(self, job: str = "") -> list[JobEntry]:
        """Return the running agents, oldest first, and delete the entries of those that ended."""
        pattern = f"{safe_name(job)}/*.json" if job else "*/*.json"
        entries = []
        for path in sorted(self._folder.glob(pattern)):
            entry = _read_entry(path)
            if entry is not None and entry.is_alive():
                entries.append(entry)
            else:
                _unlink(path)
        return sorted(entries, key=lambda entry: entry.started)


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # another agent has removed it


def _read_entry(path: Path) -> JobEntry | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_ENTRY_BYTES_MAX), type=JobEntry)
    except (OSError, *UNREADABLE):
        return None


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # already gone, or not removable by this user
        path.unlink()
        path.parent.rmdir()


class NodeSlot:
    """The number of this agent among the agents of one job on one machine, held while it lives.

    `node_id` is the host name for number 0, else `<host>.<number>`. A restarted agent gets its
    predecessor's number again, because the lock ends with the process that held it. Programs that
    this process starts do not inherit the lock's descriptor.
    """

    def __init__(self, node_id: str, path: Path, descriptor: int) -> None:
        self.node_id = node_id
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, folder: Path, job: str, hostname: str) -> NodeSlot:
        """Take the lowest number that no living agent of `job` holds."""
        slots = folder / "slots"
        slots.mkdir(mode=0o700, exist_ok=True)
        for index in range(_SLOTS_MAX):
            path = slots / safe_name(f"{safe_name(job)}.{safe_name(hostname)}.{index}.lock")
            descriptor = _lock(path)
            if descriptor is not None:
                host = safe_name(hostname)
                return cls(f"{host}.{index}" if index else host, path, descriptor)
        raise ConfigurationError(
            f"job {job} has {_SLOTS_MAX} agents on this machine already", slug="node-slots"
        )

    def release(self) -> None:
        """Release the number."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()  # while it is locked: a waiting agent then opens a new file
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> NodeSlot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock on `path`; None if another process holds it."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(descriptor)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(mine, path.stat()):
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # a cleaner removed the file between open and lock: try again
