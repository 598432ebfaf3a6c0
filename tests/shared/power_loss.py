"""Records the file operations of a test, and says what a loss of power may leave of them.

The model is what POSIX promises, without what one file system adds to it. fsync of a file makes its
content durable, and not its name. fsync of a folder makes durable which names are in it. Everything
else may be lost or kept in any combination, whatever its order was. A write may also be kept in
part, or as zeros. A folder whose name is lost takes its content with it.

`Recorder` sees what a process does by `os`. It can stop it before an operation, as SIGKILL does.
`crash_states` is pure. `check_power_loss` writes each state to a folder and has it checked.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The folder that is recorded, as a model's number of a file.
TOP = 0
# With more combinations than this of what is lost and kept, some are drawn.
COMBINATIONS_MAX = 256
_DRAWN = 100


class KilledError(BaseException):
    """The recorded process is killed. Not an Exception: no code of it may go on."""


@dataclass(frozen=True)
class Name:
    """A folder gets a name for a file or folder."""

    folder: int
    name: str
    of: int
    is_folder: bool = False


@dataclass(frozen=True)
class Unname:
    """A folder loses a name."""

    folder: int
    name: str


@dataclass(frozen=True)
class Write:
    """A file gets content at an offset."""

    of: int
    at: int
    content: bytes


@dataclass(frozen=True)
class Sync:
    """fsync of a file or folder. `by`: the function that called it, and of what."""

    of: int
    by: str


@dataclass(frozen=True)
class Acknowledge:
    """The process says that something is durable."""

    what: Any


Operation = Name | Unname | Write | Sync | Acknowledge
# Content by path; None for a folder.
Tree = Mapping[str, bytes | None]


class Recorder:
    """Records what this process does below a folder, from its construction on.

    `without` names calls of fsync that do nothing, as `Sync.by` does: a planted fault.
    `kill_before`: the operation, by its index, before which the process is killed.
    """

    def __init__(self, monkeypatch: Any, top: Path, without: Collection[str] = ()) -> None:
        self.operations: list[Operation] = []
        self.kill_before: int | None = None
        self.is_killed = False
        self._without = without
        self._lock = threading.RLock()
        found = top.stat()
        self._files = {(found.st_dev, found.st_ino): TOP}
        self._count = TOP + 1
        # Equal histories leave equal states.
        draws = itertools.count()
        monkeypatch.setattr(secrets, "token_hex", lambda size=16: f"{next(draws):0{2 * size}x}")
        for name in ("open", "mkdir", "write", "pwrite", "fsync", "link", "unlink", "rmdir"):
            real = getattr(os, name)
            acts: Callable[..., Any] = getattr(self, f"_{name}")
            monkeypatch.setattr(os, name, self._recorded(real, acts))

    def acknowledge(self, what: Any) -> None:
        """Note that the process has said that `what` is durable."""
        self.operations.append(Acknowledge(what))

    def revive(self) -> None:
        """Let a further process run, in place of the killed one."""
        self.kill_before, self.is_killed = None, False

    def _recorded(self, real: Callable[..., Any], act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return act(real, *args, **kwargs)

        return call

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)

    def _about_to_act(self) -> None:
        if self.is_killed or len(self.operations) == self.kill_before:
            self.is_killed = True
            raise KilledError

    def _known(self, found: os.stat_result) -> int | None:
        return self._files.get((found.st_dev, found.st_ino))

    def _folder(self, path: Any, dir_fd: int | None) -> tuple[int | None, str]:
        """Return the folder that a path is in, if it is recorded, and the name there."""
        parent, _, name = os.fspath(path).rpartition("/")
        if parent or dir_fd is None:
            found = os.stat(parent or ".", dir_fd=dir_fd)
        else:
            found = os.fstat(dir_fd)
        return self._known(found), name

    def _new(self, found: os.stat_result) -> int:
        number, self._count = self._count, self._count + 1
        self._files[found.st_dev, found.st_ino] = number
        return number

    def _open(
        self, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        folder, name = self._folder(path, dir_fd) if flags & os.O_CREAT else (None, "")
        if folder is None or _exists(path, dir_fd):
            return int(real(path, flags, mode, dir_fd=dir_fd))
        self._about_to_act()
        descriptor = int(real(path, flags, mode, dir_fd=dir_fd))
        self._add(Name(folder, name, self._new(os.fstat(descriptor))))
        return descriptor

    def _mkdir(self, real: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if _exists(path, dir_fd):
            real(path, mode, dir_fd=dir_fd)
            return
        folder, name = self._folder(path, dir_fd)
        if folder is None:
            real(path, mode, dir_fd=dir_fd)
            return
        self._about_to_act()
        real(path, mode, dir_fd=dir_fd)
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        self._add(Name(folder, name, self._new(found), is_folder=True))

    def _write(self, real: Any, descriptor: int, content: Any) -> int:
        if self._known(os.fstat(descriptor)) is None:
            return int(real(descriptor, content))
        at = os.lseek(descriptor, 0, os.SEEK_CUR)
        return self._wrote(lambda: real(descriptor, content), descriptor, content, at)

    def _pwrite(self, real: Any, descriptor: int, content: Any, at: int) -> int:
        return self._wrote(lambda: real(descriptor, content, at), descriptor, content, at)

    def _wrote(self, write: Callable[[], int], descriptor: int, content: Any, at: int) -> int:
        number = self._known(os.fstat(descriptor))
        if number is None:
            return write()
        self._about_to_act()
        written = write()
        self._add(Write(number, at, bytes(content[:written])))
        return written

    def _fsync(self, real: Any, descriptor: int) -> None:
        number = self._known(os.fstat(descriptor))
        if number is None:
            real(descriptor)
            return
        self._about_to_act()
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        caller = sys._getframe(2).f_code.co_qualname
        by = f"{caller} of a {'folder' if is_folder else 'file'}"
        if by not in self._without:
            self._add(Sync(number, by))

    def _link(self, real: Any, source: Any, target: Any, **how: Any) -> None:
        folder, name = self._folder(target, how.get("dst_dir_fd"))
        number = self._known(os.stat(source, dir_fd=how.get("src_dir_fd"), follow_symlinks=False))
        if folder is None or number is None:
            real(source, target, **how)
            return
        self._about_to_act()
        real(source, target, **how)
        self._add(Name(folder, name, number))

    def _unlink(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed(real, path, dir_fd)

    def _rmdir(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed(real, path, dir_fd)

    def _removed(self, real: Any, path: Any, dir_fd: int | None) -> None:
        folder, name = self._folder(path, dir_fd)
        if folder is None:
            real(path, dir_fd=dir_fd)
            return
        self._about_to_act()
        real(path, dir_fd=dir_fd)
        self._add(Unname(folder, name))


def _exists(path: Any, dir_fd: int | None) -> bool:
    try:
        os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def crash_states(
    operations: Sequence[Operation], first: int = 0, seen: set[Any] | None = None
) -> Iterator[tuple[Tree, tuple[Any, ...]]]:
    """Yield each tree that a loss of power may leave, and what was acknowledged before it.

    The power is lost after each operation from the index `first` on. No state comes twice, nor one
    that is `seen`.
    """
    draw = random.Random(len(operations))
    seen = set() if seen is None else seen
    for end in range(first, len(operations) + 1):
        done = operations[:end]
        said = tuple(each.what for each in done if isinstance(each, Acknowledge))
        for kept in _combinations(done, draw):
            tree = _tree(kept)
            if (state := (said, tuple(sorted(tree.items())))) not in seen:
                seen.add(state)
                yield tree, said


def _combinations(
    done: Sequence[Operation], draw: random.Random
) -> Iterator[list[Name | Unname | Write]]:
    """Yield what may be kept of these operations, in their order."""
    synced: set[int] = set()
    choices: list[tuple[Operation | None, ...]] = []
    for operation in reversed(done):
        match operation:
            case Sync(of):
                synced.add(of)
            case Name(folder) | Unname(folder):
                choices.append((operation,) if folder in synced else (operation, None))
            case Write(of, at, content):
                zeros = Write(of, at, bytes(len(content)))
                half = Write(of, at, content[: len(content) // 2])
                choices.append((operation,) if of in synced else (operation, None, zeros, half))
            case Acknowledge():
                pass
    choices.reverse()
    count = 1
    for each in choices:
        count *= len(each)
    if count <= COMBINATIONS_MAX:
        chosen = [*itertools.product(*choices)]
    else:
        newest = tuple(each[0] for each in choices)
        chosen = [newest, tuple(each[-1] for each in choices)]
        for index, each in enumerate(choices):
            chosen += [(*newest[:index], one, *newest[index + 1 :]) for one in each[1:]]
        chosen += [tuple(map(draw.choice, choices)) for _ in range(_DRAWN)]
    for kept in chosen:
        yield [one for one in kept if isinstance(one, Name | Unname | Write)]


def _tree(kept: Sequence[Name | Unname | Write]) -> dict[str, bytes | None]:
    names: dict[int, dict[str, Name]] = {}
    contents: dict[int, bytearray] = {}
    for operation in kept:
        match operation:
            case Name(folder, name):
                names.setdefault(folder, {})[name] = operation
            case Unname(folder, name):
                names.get(folder, {}).pop(name, None)
            case Write(of, at, content):
                file = contents.setdefault(of, bytearray())
                file.extend(bytes(max(0, at + len(content) - len(file))))
                file[at : at + len(content)] = content
    tree: dict[str, bytes | None] = {}

    def add(folder: int, path: str) -> None:
        for name, entry in names.get(folder, {}).items():
            below = f"{path}{name}"
            tree[below] = None if entry.is_folder else bytes(contents.get(entry.of, b""))
            if entry.is_folder:
                add(entry.of, f"{below}/")

    add(TOP, "")
    return tree


def check_power_loss(
    operations: Sequence[Operation],
    check: Callable[[Path, tuple[Any, ...]], None],
    first: int = 0,
    seen: set[Any] | None = None,
) -> int:
    """Check each state that a loss of power may leave, see `crash_states`; return their number.

    `check` gets a folder with the state, and what was acknowledged. It raises an error.
    """
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    checked = 0
    for tree, said in crash_states(operations, first, seen):
        checked += 1
        with tempfile.TemporaryDirectory(prefix="elastane-power-", dir=memory) as folder:
            top = Path(folder)
            for path, content in sorted(tree.items()):
                if content is None:
                    (top / path).mkdir()
                else:
                    (top / path).write_bytes(content)
            try:
                check(top, said)
            except Exception as error:
                told = "\n".join(
                    f"  {path}: {'folder' if content is None else content[:60]!r}"
                    for path, content in sorted(tree.items())
                )
                raise AssertionError(
                    f"acknowledged: {said}; then the power was lost. It left:\n{told}\n{error!r}"
                ) from error
    return checked
