"""The first process of a container: makes what the container sees, then becomes its program.

It makes namespaces of mounts and processes. The machine's files are there as in an image, except
for those of others: /tmp and /run are the container's own, /dev/shm has 64 MB as containers have
it, and mount points are made without a trace on the machine. Argument: a file of JSON with `root`
(an empty folder), `mounts` (source, target, read only), `visible`, `argv`, `env`, `cwd`, `user`,
`read_only`. With a second argument, the socket of a process that has imported torch, a fork of that
process becomes the program if it can (`warm_start.py`), and this one ends as it does.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

BIND, REC, REMOUNT, READ_ONLY, PRIVATE = 0x1000, 0x4000, 0x20, 0x1, 0x40000
NEW_MOUNTS, NEW_PIDS, DEATH_SIGNAL = 0x20000, 0x20000000, 1
NOT_STARTED = 128
DEVICES = {"null", "zero", "full", "random", "urandom", "tty"}
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source, target, kind="", flags=0, options=""):
    given = [str(text).encode() for text in (source, target, kind)]
    if _libc.mount(*given, flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {source} {target}: {options}")


def bind(source, target):
    mount(source, target, "", BIND | REC)


class Root:
    """A file system in memory in which the machine's folders are bound."""

    def __init__(self, root):
        self.root = Path(root)
        # Folders whose entries are ours to make.
        self.own = set()
        mount("tmpfs", root, "tmpfs", 0, "mode=755")
        self._fill(Path("/"), leave={"proc", "tmp", "run", "dev"})
        for name, options in (("tmp", "mode=1777"), ("run", "mode=755"), ("dev", "mode=755")):
            self._memory(Path("/", name), options)
        (self.root / "proc").mkdir()
        mount("proc", self.root / "proc", "proc")
        self._devices()

    def _memory(self, path, options):
        here = self._here(path)
        here.mkdir(exist_ok=True)
        mount("tmpfs", here, "tmpfs", 0, options)
        self.own.add(path)

    def _devices(self):
        dev = self.root / "dev"
        for entry in Path("/dev").iterdir():
            if entry.name in DEVICES or entry.name.startswith("nvidia"):
                (dev / entry.name).touch()
                bind(entry, dev / entry.name)
        for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
            (dev / name).symlink_to(f"/proc/self/fd{target}")
        (dev / "shm").mkdir()
        mount("tmpfs", dev / "shm", "tmpfs", 0, "mode=1777,size=64m")

    def _here(self, path):
        return self.root / path.relative_to("/")

    def _fill(self, folder, leave=frozenset()):
        """Bind each entry of one of the machine's folders into ours of the same name."""
        self.own.add(folder)
        for entry in folder.iterdir():
            here = self._here(entry)
            if entry.name in leave or entry == self.root:
                continue
            if entry.is_symlink():
                here.symlink_to(entry.readlink())
            elif entry.is_dir():
                here.mkdir()
                bind(entry, here)
            elif entry.is_file():
                here.touch()
                bind(entry, here)

    def place(self, path, is_folder):
        """Make sure that something may be mounted there; return where that is."""
        seen = Path("/")
        parts = [part for part in Path(path).parts if part != "/"]
        while parts:
            child = seen / parts.pop(0)
            here = self._here(child)
            if here.is_symlink():
                target = Path(seen, here.readlink())
                parts = [*Path(os.path.normpath(target)).parts[1:], *parts]
                seen = Path("/")
                continue
            if not here.exists():
                self._make(seen, here, bool(parts) or is_folder)
                if here.is_dir():
                    self.own.add(child)
            seen = child
        return self._here(seen)

    def _make(self, folder, here, is_folder):
        if folder not in self.own:
            self._unfold(folder)
        here.mkdir() if is_folder else here.touch()

    def _unfold(self, folder):
        """Put a folder of ours, with the same entries, over one of the machine's."""
        mount("tmpfs", self._here(folder), "tmpfs", 0, "mode=755")
        self._fill(folder)

    def open_to_all(self, path):
        """Let any user reach what is there, as in an image, also through the home of another."""
        for folder in reversed(Path(path).parents):
            if folder not in self.own and folder.is_dir() and not folder.stat().st_mode & 1:
                self._unfold(folder)

    def close(self):
        """Let nothing be written but into volumes, /tmp and /run."""
        for folder in sorted(self.own, key=lambda each: -len(each.parts)):
            if folder.parts[1:2] not in (("tmp",), ("run",)) and os.path.ismount(
                self._here(folder)
            ):
                mount("", self._here(folder), "", BIND | REMOUNT | READ_ONLY)

    def show(self, source, target, read_only=False):
        there = self.place(target, os.path.isdir(source))
        bind(source, there)
        if read_only:
            mount("", there, "", BIND | REMOUNT | READ_ONLY)


def apart():
    """Go on as process 1 of namespaces of its own; what waits outside ends as that ends.

    unshare(1) would do, but some of its versions exit with 1 where the process was killed.
    """
    if _libc.unshare(NEW_MOUNTS | NEW_PIDS):
        raise OSError(ctypes.get_errno(), "unshare")
    if (pid := os.fork()) == 0:
        _libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
        return
    _, status = os.waitpid(pid, 0)
    end_as(os.waitstatus_to_exitcode(status))


def end_as(code):
    """End as a process did: with its exit code, or by the signal that killed it."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else NOT_STARTED - code)


def enter(told):
    """Make what the container sees, and go there as its user."""
    mount("", "/", "", REC | PRIVATE)
    root = Root(told["root"])
    for path in told["visible"]:
        if path.startswith(("/tmp/", "/run/", "/dev/")):
            root.show(path, path)
        elif told["user"]:
            root.open_to_all(path)
    for source, target, read_only in sorted(told["mounts"], key=lambda each: each[1]):
        root.show(source, target, read_only)
    if told["read_only"]:
        root.close()
    os.chroot(told["root"])
    os.chdir(told["cwd"])
    if (user := told["user"]) is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def become_fork(spec, server):
    """Let a fork of the server be the container's program, and end as it; return if it cannot.

    Its number, as the machine sees it, is written beside `spec`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(server)
        socket.send_fds(asking, [spec.encode()], [1])
        if not (pid := asking.recv(64)):
            return
        written = Path(spec).with_suffix(".new")
        written.write_bytes(pid)
        written.rename(Path(spec).with_suffix(".pid"))
        end_as(int(asking.recv(64) or -signal.SIGKILL))


def main():
    told = json.loads(Path(sys.argv[1]).read_text())
    try:
        if sys.argv[2:]:
            become_fork(*sys.argv[1:])
        apart()
        enter(told)
        os.execvpe(told["argv"][0], told["argv"], told["env"])
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"the container cannot start: {told['argv'][:1]}: {error}", file=sys.stderr)
        sys.exit(NOT_STARTED)


if __name__ == "__main__":
    main()
