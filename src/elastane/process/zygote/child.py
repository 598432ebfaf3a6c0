"""Makes a forked worker equal to a fresh interpreter, and runs its program.

This module removes every trace of the zygote: environment, arguments, import path, `__main__`,
standard streams, random state, and values that modules computed once for their process. It runs in
the worker only. An error of the script leaves through the interpreter, without the frames of this
file. The docstring of `become` lists what is not restored, and why.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import importlib
import importlib.machinery
import io
import itertools
import os
import runpy
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, TextIO

from elastane.process import collectives
from elastane.process.execspawn import RUN_PATH_CODE, command_line
from elastane.process.kernel import show_program
from elastane.process.process import WorkerCommand
from elastane.process.program_end import below_frames_of, is_failure, leave_error
from elastane.process.status_page import PAGE_FD_VARIABLE, WorkerPage
from elastane.process.zygote.early import EarlyModules, Imported, ImportNotes


@dataclass(frozen=True, slots=True)
class Birth:
    """The state of the zygote's interpreter before it imported any user module."""

    main: dict[str, Any]  # `__main__` as every program starts with it
    path: tuple[str, ...]  # the import path without its first entry


def note_birth() -> Birth:
    """Return the state of this interpreter that every worker starts with."""
    here = vars(sys.modules["__main__"])
    main: dict[str, Any] = {
        "__name__": "__main__",
        "__doc__": None,
        "__package__": None,
        "__loader__": importlib.machinery.BuiltinImporter,
        "__spec__": None,
    }
    if "__annotations__" in here:  # until Python 3.13
        main["__annotations__"] = {}
    main["__builtins__"] = sys.modules["builtins"]
    return Birth(main=main, path=tuple(sys.path if sys.flags.safe_path else sys.path[1:]))


def first_path_entry(command: WorkerCommand) -> str:
    """Return the first entry of Python's import path for `command`."""
    if command.kind == "script":
        return str(Path(command.target).resolve().parent)
    return command.cwd if command.kind == "module" else ""


def become(command: WorkerCommand, birth: Birth, imported: Imported) -> Callable[[], None]:
    """Make this process the one of `command`; return its program, for the stack's bottom.

    Descriptors and folder are in place already. Not restored: the hash seed (shared by all workers
    of a node, as by forks of `multiprocessing`), garbage frozen by the zygote, modules that are
    imported already, and three frames of `python -m` below the script.
    """
    os.environ.clear()
    os.environ.update(command.env)
    time.tzset()
    sys.orig_argv[:] = command_line(command, sys.executable)
    show_program(sys.orig_argv, command.env)
    _renew_streams()
    _renew_import_path(command, birth)
    _renew_modules()
    _renew_random_state()
    _watch_fatal_signals()
    _show_on_page(command.env)
    EarlyModules(imported, command.env).hide()
    return _program(command, birth)


def _show_on_page(env: Mapping[str, str]) -> None:
    """Show the agent this worker's collectives, and its imports, which later workers then have."""
    # there is no status page, or none of this version
    with contextlib.suppress(OSError, ValueError):
        page = WorkerPage.open(int(env.get(PAGE_FD_VARIABLE, "")))
        ImportNotes(page.note_import).begin()
        collectives.begin(page)


def _renew_import_path(command: WorkerCommand, birth: Birth) -> None:
    added = [entry for entry in sys.path[1:] if entry not in birth.path]
    first = () if sys.flags.safe_path else (first_path_entry(command),)
    sys.path[:] = [*first, *birth.path, *added]
    importlib.invalidate_caches()


def _renew_streams() -> None:
    """Reset the three text streams to the buffering of their present targets.

    The stream objects stay the same, because handlers that modules made at import hold them.
    Follows create_stdio of CPython's pylifecycle.c.
    """
    for fd, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        _renew_stream(fd, stream)


class LogFile(io.FileIO):
    """A log file that a full disk fails: output is lost there, and the program goes on.

    Otherwise a print would end the worker. Once there is room, a line says how much is missing.
    """

    lost_bytes = 0

    def write(self, data: Any, /) -> int:
        """Write what there is room for; return the number of bytes written or lost."""
        size = memoryview(data).nbytes
        try:
            if self.lost_bytes:
                lost = f"\n[elastane: the disk was full, {self.lost_bytes} bytes are missing]\n"
                super().write(lost.encode())
                self.lost_bytes = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.lost_bytes += size
            return size


# A worker's streams look as in a fresh interpreter.
LogFile.__name__ = io.FileIO.__name__


def _renew_stream(fd: int, stream: TextIO) -> None:
    assert isinstance(stream, io.TextIOWrapper)
    name, mode, encoding, errors = stream.name, stream.mode, stream.encoding, stream.errors
    through = stream.write_through  # python -u, which the zygote is started with
    unbuffered = through and mode == "w"
    binary: Any
    if mode == "w" and stat.S_ISREG(os.fstat(fd).st_mode):
        raw: Any = LogFile(fd, "wb", closefd=False)
        binary = raw if unbuffered else io.BufferedWriter(raw)
    else:
        buffering = 0 if unbuffered else -1
        binary = io.open(fd, f"{mode}b", buffering, closefd=False)  # noqa: SIM115, UP020
        raw = binary if unbuffered else binary.raw
    raw.name = name
    line_buffering = not through and (raw.isatty() or fd == 2)
    renew: Any = stream.__init__  # type: ignore[misc]
    renew(binary, encoding, errors, "\n", line_buffering, through)
    setattr(stream, "mode", mode)  # noqa: B010 - settable in C, read-only in typeshed


def _renew_modules() -> None:
    """Reset values that imported modules computed once for their process."""
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None:  # its key authenticates connections, so workers must not share it
        processes._current_process = type(processes._current_process)()
        processes._process_counter = itertools.count(1)
        processes._children = set()
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None  # TMPDIR is read once
    logging: Any = sys.modules.get("logging")
    if logging is not None:  # the origin of relativeCreated; nanoseconds since Python 3.13
        whole = isinstance(logging._startTime, int)
        logging._startTime = time.time_ns() if whole else time.time()
    linecache: Any = sys.modules.get("linecache")
    if linecache is not None:
        linecache.clearcache()
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available():
        distributed.set_debug_level_from_env()


def _renew_random_state() -> None:
    """Seed from the operating system, as each library does at import, because forks share a seed.

    `random` does so itself after a fork. CUDA generators are made when CUDA is first used.
    """
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _program(command: WorkerCommand, birth: Birth) -> Callable[[], None]:
    # A new module: the zygote's own is frozen, so its references would never be collected.
    main = sys.modules["__main__"] = ModuleType("__main__")
    if "__mp_main__" in sys.modules:  # multiprocessing's name for it, from its import on
        sys.modules["__mp_main__"] = main
    vars(main).clear()
    vars(main).update(birth.main)
    if command.kind == "module":
        sys.argv[:] = ["-m", *command.args]
        return _with_own_frames_hidden(lambda: _run_module(command.target))
    if command.kind == "run-path":
        sys.argv[:] = ["-c", command.target, *command.args]
        return _with_own_frames_hidden(lambda: _run(RUN_PATH_CODE.encode(), "<string>"))
    sys.argv[:] = [command.target, *command.args]
    path = _absolute(command.target)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader)
    return _with_own_frames_hidden(lambda: _run(loader.get_data(path), path))


def _absolute(path: str) -> str:
    """Return `path` as the interpreter shows it in `__file__` (CPython's _Py_abspath)."""
    return path if path.startswith("/") else f"{Path.cwd()}/{path}"


def _run(source: bytes, path: str) -> None:
    code: CodeType = compile(source, path, "exec", dont_inherit=True)
    exec(code, vars(sys.modules["__main__"]))


def _run_module(name: str) -> None:
    run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    run_as_main(name)


def _with_own_frames_hidden(program: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        pid = os.getpid()
        try:
            program()
        except SystemExit as error:
            if is_failure(error):
                below = below_frames_of(__file__, error.__traceback__)
                leave_error(error.with_traceback(below), pid, os.environ)
            raise
        except BaseException:
            _hide_own_frames(pid)
            raise

    return run


def _hide_own_frames(pid: int) -> None:
    """Call the excepthook with the script's frames only; the interpreter ends as always.

    The error is left for the agent before the interpreter's teardown, which takes 0.3 s with torch,
    so that the error file has the time of the error.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, full: TracebackType | None) -> None:
        sys.excepthook = hook
        error.__traceback__ = sys.last_traceback = below_frames_of(__file__, full)
        leave_error(error, pid, os.environ)
        hook(kind, error, error.__traceback__)

    sys.excepthook = show


def _watch_fatal_signals() -> None:
    """Print the Python stacks of all threads at a fatal signal, then torch's native stack.

    Each handler calls the one before it. It costs microseconds here, and nothing until a signal.
    """
    faulthandler.disable()  # the zygote's own, so that torch's handler is installed below this one
    torch_c: Any = sys.modules.get("torch._C")
    if torch_c is not None and hasattr(torch_c, "_set_print_stack_traces_on_fatal_signal"):
        torch_c._set_print_stack_traces_on_fatal_signal(True)
        # torch counts SIGINT as fatal; here it stays the script's KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT) or signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed
        faulthandler.enable(file=2, all_threads=True)
