"""How a child process of the user's own process starts, is waited for and is ended.

Owns the set-up of a child (death with its parent, streams, result pipe), its CPUs, and sending a
function of the main program by value if a child could not import it. That is the case for a program
that launches at its top level, without `if __name__ == "__main__":`, since the import would launch
again. It is also the case for a program without a file (a notebook, `python -c`). The module only
waits for and reaps its own children. A function that cannot be pickled raises ConfigurationError.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.redirects import redirect_stderr, redirect_stdout

from elastane.elastic.multiprocessing.errors import record
from elastane.errors import ConfigurationError
from elastane.functions.payload import name_of
from elastane.process import called
from elastane.process.kernel import die_with_parent
from elastane.process.numa import bind
from elastane.process.program_end import run_and_leave
from elastane.process.topology import read_topology
from elastane.worker.call import load_of_main, pickled_result

_log = logging.getLogger(__name__)
_starting = threading.Lock()
# How long to wait after SIGKILL: a process in uninterruptible sleep is given up with an error.
KILL_WAIT_S = 5.0
_POLL_S = 0.01
# Signals that are blocked in a child until it calls its function. Otherwise Python could drop the
# exception of an inherited handler during the start, and the child would survive the signal.
ENDING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))


def death_with_parent() -> Callable[[], None] | None:
    """Return the function that a child calls to die with this process.

    None off the main thread: the kernel sends the signal when the creating thread ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    parent = os.getpid()
    return lambda: die_with_parent(parent)


def bind_child(pid: int, local_rank: int, numa_options: Any | None) -> None:
    """Bind a child to the CPUs that torch's NumaOptions select for its local rank."""
    if numa_options is None:
        return
    mode = getattr(numa_options.affinity_mode, "value", str(numa_options.affinity_mode))
    try:
        cpus = bind(read_topology(os.environ), mode, local_rank + 1)[local_rank]
        os.sched_setaffinity(pid, cpus)
    except Exception:
        if not getattr(numa_options, "should_fall_back_if_binding_fails", False):
            raise


def _own_streams() -> None:
    """Write to descriptors 1 and 2, since a fork of a notebook or test may have other streams."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            same = getattr(sys, name).fileno() == number
        except (OSError, ValueError, AttributeError):
            same = False
        if not same:
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))


@dataclass(frozen=True)
class Child:
    """The settings of a child besides its function: variables, files, result pipe, start method."""

    env: dict[str, str]
    files: tuple[str, str]
    result: Connection
    # The process to die with; 0 for none.
    parent: int
    start_method: str


def run_callable(fn: Callable[..., Any], args: tuple[Any, ...], child: Child) -> None:
    """Run as the child of a MultiprocessContext: call `fn`, and send its return value.

    Values are sent by value, tensors too, since this process may end before the other reads them. A
    value that cannot be pickled is an error of the child, with its traceback in the error file.
    """
    os.setsid()
    if child.parent and os.getppid() == child.parent:
        die_with_parent(child.parent)
    os.environ.update(child.env)
    _own_streams()
    with contextlib.ExitStack() as stack:
        redirects = (redirect_stdout, redirect_stderr)
        for path, redirect in zip(child.files, redirects, strict=True):
            if path:
                stack.enter_context(redirect(path))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        main = record(lambda: _send(child.result, fn(*args), name_of(fn)))
        if child.start_method == "spawn":
            # A forked child ends in this way by itself; a spawned one does not.
            run_and_leave(main)
        main()


def _send(result: Connection, value: Any, name: str) -> None:
    result.send_bytes(pickled_result(value, name))


def wait_any(pids: list[int], timeout_s: float) -> None:
    """Return when one of these children has ended, or after `timeout_s`."""
    poller = select.poll()
    fds = []
    try:
        for pid in pids:
            try:
                fds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return  # The child has ended and was reaped already.
            poller.register(fds[-1], select.POLLIN)
        poller.poll(max(0.0, timeout_s) * 1000)
        if not pids:
            time.sleep(min(timeout_s, _POLL_S))
    finally:
        for fd in fds:
            os.close(fd)


def end_all(pids: list[int], death_sig: signal.Signals, timeout_s: float) -> None:
    """Signal each child's session, and kill the processes that remain after the timeout."""
    for pid in pids:
        _signal_session(pid, death_sig)
    left = _wait_gone(pids, timeout_s)
    if left:
        _log.warning("processes %s did not end by %s: SIGKILL", left, death_sig.name)
    for pid in pids:
        _signal_session(pid, signal.SIGKILL)
    left = _wait_gone(left, KILL_WAIT_S)
    if left:
        _log.error("processes %s cannot be killed (uninterruptible sleep?), ignoring them", left)


def _wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Wait until all of these children have ended; return those that have not."""
    end_s = time.monotonic() + timeout_s
    while True:
        left = [pid for pid in pids if _runs(pid)]
        if not left or time.monotonic() >= end_s:
            return left
        wait_any(left[:1], min(end_s - time.monotonic(), 1.0))


def _runs(pid: int) -> bool:
    """Whether a child still runs; one that has ended is left for its parent to reap."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is None


def _signal_session(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)  # Before its setsid() the child leads no group.


class ByValue:
    """An object of the main program, pickled by value; unpickling returns the object itself."""

    def __init__(self, thing: Any) -> None:
        try:
            self._content = called.dumps(thing)
        except Exception as error:
            raise ConfigurationError(
                f"{name_of(thing)} of the main program cannot be sent to the workers: "
                f"{type(error).__name__}: {error}",
                slug="unpicklable",
                expected="a function, and what it uses, that can be pickled",
                next_step='launch below `if __name__ == "__main__":`, or import the function',
            ) from error

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return load_of_main, (self._content,)


def must_go_by_value(fn: Any, start_method: str) -> bool:
    """Whether a child could not import `fn`; call it while the program launches `fn`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if start_method == "fork" or getattr(fn, "__module__", None) != "__main__":
        return False
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is None or _launches_unguarded(path)


def of_main_by_value(arg: Any) -> Any:
    """Return an argument in the form to send: by value if it, or its class, is of `__main__`."""
    places = (getattr(arg, "__module__", None), type(arg).__module__)
    return ByValue(arg) if "__main__" in places else arg


@contextmanager
def main_not_imported() -> Iterator[None]:
    """Prevent children started in this context from importing the main program."""
    main: Any = sys.modules["__main__"]
    with _starting:
        spec, path = main.__spec__, vars(main).pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if path is not None:
                main.__file__ = path


def is_guarded(source: str | bytes, line: int) -> bool:
    """Whether a line of a program is inside an `if` that tests `__name__`."""
    return any(
        isinstance(node, ast.If)
        and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        for node in ast.walk(ast.parse(source))
    )


def _launches_unguarded(path: str) -> bool:
    line = _line_of_main()
    if line is None:
        return False
    try:
        return not is_guarded(Path(path).read_bytes(), line)
    except (OSError, SyntaxError, ValueError):
        return False  # Without source, do as multiprocessing does.


def _line_of_main() -> int | None:
    """Return the line at the main program's top level that this call comes from."""
    main = vars(sys.modules["__main__"])
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is main and frame.f_code.co_name == "<module>":
            return frame.f_lineno
        frame = frame.f_back
    return None
