"""The zygote's loop: import the modules that workers need, then fork a worker for each request.

This module owns the zygote process. It must stay single-threaded and must never use CUDA, because
neither survives a fork. If a preloaded module breaks that, `warm` says so, and the agent starts
workers by exec. It installs no signal handler and opens nothing, because workers would inherit it.
It dies with its agent. Its own death harms no worker, because each is a child of the agent.
"""

from __future__ import annotations

import ast
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
from typing import Any, NoReturn

from elastane.process.collectives import watch_torch
from elastane.process.kernel import bind_to_cpus, die_with_parent, place_descriptors
from elastane.process.process import WorkerCommand
from elastane.process.zygote import fitness, protocol
from elastane.process.zygote.child import Birth, become, first_path_entry, note_birth
from elastane.process.zygote.early import Imported, outside
from elastane.process.zygote.fitness import is_read_at_import
from elastane.process.zygote.learned import ImportFindings, import_learned, watched
from elastane.process.zygote.store import serve

# A forked process waits this long to become the agent's child, which takes microseconds. It is less
# than the client's SPAWN_TIMEOUT_S, after which the client takes the zygote for hung.
ADOPTION_TIMEOUT_S = 2.0
ADOPTION_POLL_S = 0.0002
# Packages are few; this bounds a message.
UNSAFE_REPORTED_MAX = 64
# What a fork does: a worker's program returns None, another zygote the next one's work.
Work = Callable[[], Any]
# Modules that torch._dynamo imports when the interpreter ends, if they are installed. Code that is
# compiled then makes Python forget its interruption: the exit code would be 1, not SIGINT's.
_AT_EXIT = ("tabulate",)
_WORDS = (b"environ", b"putenv")
_METHODS = frozenset({"setdefault", "update", "pop", "putenv", "unsetenv"})
_DEVICES = "CUDA_VISIBLE_DEVICES"
_DEVICE_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
# An assignment's value: a text, None for a deletion, or a value that is not known.
_UNKNOWN = object()


class RefusedError(Exception):
    """This worker cannot be a fork; the text is the reason."""


def main(args: Sequence[str]) -> Work | None:
    """Serve the agent; return None when it is gone, and in each fork what it is to do."""
    agent, preload = int(args[0]), [name for name in args[1].split(",") if name]
    birth = note_birth()
    begun = time.monotonic()
    chosen = ImportFindings()
    with without_collections(), devices_counted_by_driver():
        with watched(chosen):
            problems, imported = import_all(preload)
        chosen.try_renewals()
    devices = {name: value for name, value in chosen.reads.items() if name == _DEVICES}
    imported = replace(_with_findings(imported, chosen), devices=devices)
    unfit = check_forkable() or _why_ranked(chosen)
    return _serve(agent, birth, imported, {"problems": problems, "unfit": unfit}, begun)


def _serve_more(
    agent: int, birth: Birth, imported: Imported, modules: Sequence[str]
) -> Work | None:
    """Serve as `main` does, as a zygote that also imports `modules`."""
    begun = time.monotonic()
    with without_collections(), devices_counted_by_driver():
        found = import_learned(modules, check_forkable)
    imported = replace(_with_findings(imported, found), reads=found.reads)
    report = {
        "problems": [],
        "unfit": check_forkable(),
        "unsafe": sorted(found.unsafe)[:UNSAFE_REPORTED_MAX],
    }
    return _serve(agent, birth, imported, report, begun)


def _serve(
    agent: int, birth: Birth, imported: Imported, report: Mapping[str, Any], begun: float
) -> Work | None:
    """Report that this zygote is warm, and fork on request."""
    free_reducers_first()
    watch_torch()
    gc.collect()
    gc.freeze()  # so that a collection in a worker does not copy every page of the modules
    sock = socket.socket(fileno=protocol.ZYGOTE_FD)
    has_torch = importlib.util.find_spec("torch") is not None
    took_s = time.monotonic() - begun
    protocol.send(sock, {"op": "warm", "torch": has_torch, "took_s": took_s, **report})
    return _Loop(sock, agent, birth, imported, _preloaded_files()).run()


def _with_findings(imported: Imported, found: ImportFindings) -> Imported:
    """Return the imports, with those since and the variables that their packages set.

    Variables that torch itself sets are left out: a worker that imports less of torch would lack
    them.
    """
    writes = {name: by for name, by in found.writes.items() if by[0] not in ("", "torch")}
    return replace(
        imported,
        origins=outside(sys.modules),
        writes={**imported.writes, **writes},
        renewed=imported.renewed | found.renewed,
    )


def _why_ranked(chosen: ImportFindings) -> str:
    """Return why packages that the user preloads forbid forks; empty if none does.

    They kept a variable of one worker at import, and each fork would have the zygote's value.
    """
    for package, variable in sorted(chosen.ranked.items()):
        return (
            f"{package} reads {variable} when it is imported, so every worker would have the value"
            f" of the process that preloads it; next: leave {package}, and what imports it, out of"
            " --preload"
        )
    return ""


def import_all(names: Iterable[str]) -> tuple[list[str], Imported]:
    """Import these modules, also from the current folder; return the failures and the imports.

    Every package that is imported once torch is counts as bound to torch.
    """
    problems: dict[str, str] = {}
    bound: set[str] = set()
    if not sys.flags.safe_path:
        # last, so that it hides no module that a worker would import
        sys.path.append(sys.path.pop(0))
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
    """Suspend Python's search for unreachable cycles; new modules leave few of them.

    It takes an eighth of the processor time of torch's import. A setting that a module itself makes
    during its import stays.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)
    none = gc.get_threshold()
    try:
        yield
    finally:
        if gc.get_threshold() == none:
            gc.set_threshold(*before)


@contextlib.contextmanager
def devices_counted_by_driver() -> Iterator[None]:
    """Let `torch.cuda.is_available()` ask the driver's management library.

    By default it asks the CUDA runtime, which no fork could use afterwards.
    """
    before = os.environ.get(_DEVICE_CHECK)
    os.environ[_DEVICE_CHECK] = "1"
    try:
        yield
    finally:
        del os.environ[_DEVICE_CHECK]
        if before is not None:
            os.environ[_DEVICE_CHECK] = before


def check_forkable() -> str:
    """End the threads that end at a fork; return why no fork is safe, or an empty text.

    OpenBLAS starts a pool when NumPy is imported, ends it in its own handler before a fork, and
    starts another on first use (both sides). Other pools have no such handler.
    """
    torch = sys.modules.get("torch")
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch is not None and torch.cuda._is_in_bad_fork()))
    _, status = os.waitpid(pid, 0)
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    if tasks:
        names = ", ".join((task / "comm").read_text().strip() for task in tasks[:8])
        return f"a preloaded module runs {len(tasks)} threads ({names})"
    # Without a device no worker misses CUDA: torch for CUDA, on a machine for trying.
    if status != 0 and torch is not None and torch.cuda.is_available():
        return "a preloaded module has used CUDA"
    return ""


@dataclass(frozen=True, slots=True)
class _Loop:
    """The zygote, warm. `origins`: the files of the top-level modules that it has imported."""

    sock: socket.socket
    agent: int
    birth: Birth
    imported: Imported
    origins: Mapping[str, str]

    def run(self) -> Work | None:
        """Fork on request; return None when the agent is gone, and in each fork its work."""
        while (request := protocol.receive(self.sock)) is not None:
            message, fds = request
            work = self._fork_twice(message, fds)
            if work is not None:
                return work
            for fd in fds:
                os.close(fd)
        return None

    def _fork_twice(self, message: protocol.Message, fds: list[int]) -> Work | None:
        """Fork a child of the agent; return what it is to do there, None in the zygote."""
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
        """Become the agent's child, put everything in place, and report; or exit."""
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
                os._exit(1)  # given up by the agent, which has started another worker instead
        os.close(pidfd)
        return work

    def _prepare(self, message: protocol.Message, fds: list[int]) -> tuple[Mapping[int, int], Work]:
        """Return the descriptors that the program needs, and the program."""
        if message["op"] == "store":
            return {0: 0, 1: 1, 2: 2, 3: fds[0]}, functools.partial(serve, 3)
        if message["op"] == "zygote":
            modules = protocol.unpack_names(fds[0])
            work = functools.partial(_serve_more, self.agent, self.birth, self.imported, modules)
            return {0: 0, 1: 1, 2: 2, protocol.ZYGOTE_FD: fds[1]}, work
        command = protocol.unpack_command(
            fds[0], dict(zip(message["numbers"], fds[1:], strict=True))
        )
        os.chdir(command.cwd)
        bind_to_cpus(command.cpus)
        reason = _unfit(command, self.origins) or _other_devices(command, self.imported)
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
    """Return why only a fresh interpreter will do; called in the worker's own folder."""
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


def _other_devices(command: WorkerCommand, imported: Imported) -> str:
    """Return why a worker with a device of its own needs its own imports; "" if it does not.

    Many packages ask torch for devices as they are imported, and torch reads the variable.
    """
    for name, value in imported.devices.items():
        if command.env.get(name) != value:
            return (
                f"{name} is {command.env.get(name, 'unset')!r} for the worker, and a preloaded"
                f" package read {value or 'unset'!r}"
            )
    return ""


def _module_source(command: WorkerCommand) -> bytes:
    """Return the source that `-m` runs, if it lies under the worker's folder."""
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


def free_reducers_first() -> None:
    """Make each DDP of this process, and of its forks, free its reducer before its group."""
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    ddp: Any = getattr(module, "DistributedDataParallel", None)
    if ddp is not None and not hasattr(ddp, "__del__"):
        ddp.__del__ = _free_reducer


def _free_reducer(self: Any) -> None:
    members = vars(self)
    for name in ("logger", "reducer"):  # the logger shares the reducer
        members.pop(name, None)


def sets_too_late(source: bytes, env: Mapping[str, str]) -> str:
    """Return the first variable that the script changes and torch reads at import, or ""."""
    if not any(word in source for word in _WORDS):
        return ""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    for node in _until_torch(tree.body):
        for name, value in _changes(node, env):
            if is_read_at_import(name) and env.get(name) != value:
                return f"the script sets {name} in line {node.lineno}, before it imports torch"
    return ""


def _until_torch(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the simple statements at the top level, up to the first import of torch."""
    for node in _simple(body):
        if _imports_torch(node):
            return
        yield node


def _simple(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if not hasattr(node, "body"):
            yield node
            continue
        yield from _simple(node.body)
        for handler in getattr(node, "handlers", ()):
            yield from _simple(handler.body)
        yield from _simple(getattr(node, "orelse", []))
        yield from _simple(getattr(node, "finalbody", []))


def _imports_torch(node: ast.stmt) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [node.module or ""]
    return any(name.partition(".")[0] == "torch" for name in names)


def _changes(node: ast.stmt, env: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Yield the variables that a statement changes, with their values."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield _text(target.slice), _value(value)
        case ast.Delete(targets=targets):
            for target in targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield _text(target.slice), None
        case ast.AugAssign(target=target, value=ast.Dict() as value) if _is_environ(target):
            yield from _items(value)
        case ast.Expr(value=ast.Call(func=ast.Attribute() as func) as call):
            if func.attr in _METHODS and (_is_environ(func.value) or func.attr.endswith("env")):
                yield from _called(func.attr, call, env)


def _called(method: str, call: ast.Call, env: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Yield the changes by a call of a method of os.environ, or of os.putenv."""
    if method == "update":
        for keyword in call.keywords:
            yield keyword.arg or "", _value(keyword.value)
        for argument in call.args:
            if isinstance(argument, ast.Dict):
                yield from _items(argument)
        return
    name = _text(call.args[0]) if call.args else ""
    if method in ("pop", "unsetenv"):
        yield name, None
    elif len(call.args) > 1 and not (method == "setdefault" and name in env):
        yield name, _value(call.args[1])


def _items(node: ast.Dict) -> Iterator[tuple[str, object]]:
    for key, value in zip(node.keys, node.values, strict=True):
        yield _text(key), _value(value)


def _is_environ(node: ast.expr) -> bool:
    """Return whether an expression is `os.environ`, under any name of os, or `environ`."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return bool(name == "environ")


def _text(node: ast.expr | None) -> str:
    """Return the text of a literal; empty if it is none, as for a computed name."""
    value = node.value if isinstance(node, ast.Constant) else ""
    return value if isinstance(value, str) else ""


def _value(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else _UNKNOWN
