"""The zygote's loop: import what workers need, then fork one for each request.

Owns the zygote process. It must stay single-threaded and must never touch CUDA, for a fork
carries neither over; `warm` says so where the preloaded modules break that, and the agent then
starts workers by exec. It installs no signal handler and opens nothing, for workers would inherit
it. It dies with its agent; its own death harms no worker, for each is a child of the agent.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from elastane.process.kernel import bind_to_cpus, die_with_parent, place_descriptors
from elastane.process.process import WorkerCommand
from elastane.process.zygote import fitness, protocol
from elastane.process.zygote.child import Birth, become, first_path_entry, note_birth
from elastane.process.zygote.ddp import free_reducers_first
from elastane.process.zygote.early import Imported, outside
from elastane.process.zygote.learned import ImportFindings, import_learned, watched
from elastane.process.zygote.sources import sets_too_late
from elastane.process.zygote.store import serve

# A forked process waits this long to become the agent's child; it takes microseconds. Less than
# the client's SPAWN_TIMEOUT_S, which would take the zygote itself for hung.
ADOPTION_TIMEOUT_S = 2.0
ADOPTION_POLL_S = 0.0002

# Packages are few, and this is a bound on a message.
UNSAFE_TOLD_MAX = 64

Work = Callable[[], None]


class RefusedError(Exception):
    """This worker cannot be a fork; the text says why."""


def main(args: Sequence[str]) -> Work | None:
    """Serve the agent; returns None when it is gone, and in each worker what that is to do."""
    agent, preload = int(args[0]), [name for name in args[1].split(",") if name]
    learned = [name for name in args[2].split(",") if name]
    birth = note_birth()
    sock = socket.socket(fileno=protocol.ZYGOTE_FD)
    begun = time.monotonic()
    chosen = ImportFindings()
    with without_collections():
        with watched(chosen):
            problems, imported = import_all(preload)
        chosen.try_renewals()
        found = import_learned(learned, settle)
    imported = _with_findings(imported, chosen, found)
    free_reducers_first()
    unfit = settle() or _why_ranked(chosen)
    gc.collect()
    gc.freeze()  # so that a collection in a worker does not copy every page of the modules
    protocol.send(
        sock,
        {
            "op": "warm",
            "problems": problems,
            "unfit": unfit,
            "unsafe": sorted(found.unsafe)[:UNSAFE_TOLD_MAX],
            "torch": importlib.util.find_spec("torch") is not None,
            "took_s": time.monotonic() - begun,
        },
    )
    return _Loop(sock, agent, birth, imported, _preloaded_files()).run()


def _with_findings(imported: Imported, chosen: ImportFindings, found: ImportFindings) -> Imported:
    """Return what was imported, with what its packages did with the environment.

    What torch sets itself is left out: a worker that imports less of torch would not have it.
    """
    writes = {**chosen.writes, **found.writes}
    return replace(
        imported,
        origins=outside(sys.modules),
        reads=found.reads,
        writes={name: by for name, by in writes.items() if by[0] not in ("", "torch")},
        renewed=frozenset(chosen.renewed | found.renewed),
    )


def _why_ranked(chosen: ImportFindings) -> str:
    """Return why packages that the user chose to preload forbid forks; empty where none does.

    They kept a variable of one worker at import, and each fork would have the zygote's value.
    """
    for package, variable in sorted(chosen.ranked.items()):
        return (
            f"{package} reads {variable} when it is imported, so every worker would have the value"
            f" of the process that preloads it; next: leave {package}, and what imports it, out of"
            " --preload"
        )
    return ""


# What torch._dynamo imports when the interpreter ends, where it is installed. Code that is compiled
# then makes Python forget that it was interrupted: the exit code would be 1, not SIGINT's.
_AT_EXIT = ("tabulate",)


def import_all(names: Iterable[str]) -> tuple[list[str], Imported]:
    """Import what can be, modules of the current folder too; returns what could not, and what is.

    All that is there once torch is belongs to it.
    """
    problems: dict[str, str] = {}
    bound: set[str] = set()
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))  # last: it hides nothing that a worker would import
    for name in names:
        package = name.partition(".")[0]
        if package in problems:
            continue
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            problems[name] = f"{name}: {type(error).__name__}: {error}"[:1000]
        if "torch" in sys.modules and (package == "torch" or not bound):
            bound = set(outside(sys.modules))
    for name in _AT_EXIT:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if not sys.flags.safe_path:
        sys.path.insert(0, sys.path.pop())
    return list(problems.values())[:32], Imported(outside(sys.modules), frozenset(bound))


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Have Python look for no unreachable cycles, of which modules leave few when they are made.

    An eighth of the processor time that torch's import takes. What a module itself says of
    collections, as it is imported, stays.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)
    none = gc.get_threshold()
    try:
        yield
    finally:
        if gc.get_threshold() == none:
            gc.set_threshold(*before)


def settle() -> str:
    """End the threads that end at a fork, and say why no fork is safe; empty when it is.

    OpenBLAS starts a pool when NumPy is imported, ends it in its own handler before a fork, and
    starts another on first use (both sides). Other pools have no such handler.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    if tasks:
        names = ", ".join((task / "comm").read_text().strip() for task in tasks[:8])
        return f"a preloaded module runs {len(tasks)} threads ({names})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module has initialised CUDA"
    return ""


@dataclass(frozen=True, slots=True)
class _Loop:
    """The zygote, warm. `origins` are the files of the top-level modules it has imported."""

    sock: socket.socket
    agent: int
    birth: Birth
    imported: Imported
    origins: Mapping[str, str]

    def run(self) -> Work | None:
        """Fork on request; returns None when the agent is gone, and in each worker its work."""
        while (request := protocol.receive(self.sock)) is not None:
            message, fds = request
            work = self._fork_twice(message, fds)
            if work is not None:
                return work
            for fd in fds:
                os.close(fd)
        return None

    def _fork_twice(self, message: protocol.Message, fds: list[int]) -> Work | None:
        """Fork a worker that is the agent's child; returns its work there, None in the zygote."""
        try:
            middle = os.fork()
        except OSError as error:
            self._refuse(message, f"fork: {error}")
            return None
        if middle != 0:
            _, status = os.waitpid(middle, 0)
            if status != 0:
                self._refuse(message, f"fork: the process between ended with status {status}")
            return None
        try:
            worker = os.fork()
        except OSError:
            os._exit(1)
        if worker != 0:
            os._exit(0)
        return self._as_worker(message, fds)

    def _refuse(self, message: protocol.Message, reason: str) -> None:
        protocol.send(self.sock, {"op": "failed", "id": message["id"], "reason": reason})

    def _as_worker(self, message: protocol.Message, fds: list[int]) -> Work:
        """Become the agent's child, get everything in place, and report; or leave."""
        pidfd = os.pidfd_open(os.getpid())
        reply = {"id": message["id"], "pid": os.getpid()}
        try:
            os.setsid()
            _wait_for_adoption(self.agent)
            descriptors, work = self._prepare(message, fds)
        except (OSError, ValueError, RefusedError) as error:
            _leave(self.sock, {"op": "failed", "reason": str(error), **reply}, pidfd)
        channel, pidfd = place_descriptors(descriptors, (self.sock.detach(), pidfd)).values()
        with socket.socket(fileno=channel) as agent_side:
            try:
                protocol.send(agent_side, {"op": "started", **reply}, (pidfd,))
            except OSError:
                os._exit(1)  # given up by the agent, which has started another in its place
        os.close(pidfd)
        return work

    def _prepare(self, message: protocol.Message, fds: list[int]) -> tuple[Mapping[int, int], Work]:
        """Return the descriptors that the work needs, and the work."""
        if message["op"] == "store":
            return {0: 0, 1: 1, 2: 2, 3: fds[0]}, functools.partial(serve, 3)
        command = protocol.unpack_command(
            fds[0], dict(zip(message["numbers"], fds[1:], strict=True))
        )
        os.chdir(command.cwd)
        bind_to_cpus(command.cpus)
        reason = _unfit(command, self.origins)
        if reason:
            raise RefusedError(reason)
        return command.descriptors(), functools.partial(_start, command, self.birth, self.imported)


def _start(command: WorkerCommand, birth: Birth, imported: Imported) -> None:
    become(command, birth, imported)()


def _leave(sock: socket.socket, message: protocol.Message, pidfd: int) -> NoReturn:
    try:
        protocol.send(sock, message, (pidfd,))
    finally:
        os._exit(1)


def _wait_for_adoption(agent: int) -> None:
    deadline = time.monotonic() + ADOPTION_TIMEOUT_S
    while os.getppid() != agent and time.monotonic() < deadline:
        time.sleep(ADOPTION_POLL_S)
    die_with_parent(agent)


def _unfit(command: WorkerCommand, origins: Mapping[str, str]) -> str:
    """Return why only a fresh interpreter will do; in the worker's own folder."""
    reason = ""
    if command.kind == "script":
        reason = fitness.unfit_script(command.target)
        reason = reason or sets_too_late(Path(command.target).read_bytes(), command.env)
    elif command.kind == "module" and command.target in sys.modules:
        reason = f"{command.target} is preloaded, and is to run as a program"
    elif command.kind == "run-path" and not Path(command.target).exists():
        reason = f"{command.target} does not exist"
    elif command.kind == "run-path" and Path(command.target).is_file():
        reason = sets_too_late(Path(command.target).read_bytes(), command.env)
    elif command.kind == "module" and (source := _module_source(command)):
        reason = sets_too_late(source, command.env)
    if not reason and not sys.flags.safe_path:
        reason = fitness.shadowed(first_path_entry(command), origins)
    return reason


def _module_source(command: WorkerCommand) -> bytes:
    """Return the source that `-m` runs, where it lies under the worker's folder."""
    base = Path(command.cwd, *command.target.split("."))
    for path in (base / "__main__.py", base.with_name(f"{base.name}.py")):
        if path.is_file():
            return path.read_bytes()
    return b""


def _preloaded_files() -> dict[str, str]:
    found = {}
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if "." not in name and name != "__main__" and origin and origin.startswith("/"):
            found[name] = origin
    return found
