"""What every child process gets at its start: a death with its parent, its CPUs, its result pipe.

This is the user's process: nothing here waits for, or reaps, any child that is not its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from elastane.elastic.multiprocessing.errors import record
from elastane.elastic.multiprocessing.redirects import redirect_stderr, redirect_stdout
from elastane.functions.payload import name_of
from elastane.process.kernel import die_with_parent
from elastane.process.leaving import run_and_leave
from elastane.process.numa import bind
from elastane.process.topology import read_topology
from elastane.worker.call import pickled_result


def death_with_parent() -> Callable[[], None] | None:
    """Return what a child calls to die with this process.

    None off the main thread: the kernel's signal comes when the thread ends that made the child.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    parent = os.getpid()
    return lambda: die_with_parent(parent)


def bind_child(pid: int, local_rank: int, numa_options: Any | None) -> None:
    """Bind a child to the CPUs that torch's NumaOptions mean for its local rank."""
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
    """Write to the descriptors: a fork of a notebook or of a test has streams that go elsewhere."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            same = getattr(sys, name).fileno() == number
        except (OSError, ValueError, AttributeError):
            same = False
        if not same:
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))


# Held back from a child until it calls its function: in the middle of its making, the exception of
# an inherited handler may be raised where Python drops it, and the child would live on.
ENDING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))


@dataclass(frozen=True)
class Child:
    """What a child needs besides its function: its variables, files, result pipe and start."""

    env: dict[str, str]
    files: tuple[str, str]
    result: Connection
    # The process that it is to die with, 0 for none.
    parent: int
    start_method: str


def run_callable(fn: Callable[..., Any], args: tuple[Any, ...], child: Child) -> None:
    """Be the child of a MultiprocessContext: call `fn`, send what it returns.

    Values go by value, tensors too: this process is gone before the other one looks at them. A
    value that cannot be pickled is an error of the child, with its traceback on file.
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
            # Children that were forked leave so by themselves.
            run_and_leave(main)
        main()


def _send(result: Connection, value: Any, name: str) -> None:
    result.send_bytes(pickled_result(value, name))
