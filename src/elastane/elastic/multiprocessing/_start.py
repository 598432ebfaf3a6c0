"""What every child process sets up at its start: death with its parent, CPUs, result pipe.

This code runs in the user's process: it waits for and reaps only its own children.
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
    """Write to descriptors 1 and 2: a fork of a notebook or test may have other streams."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            same = getattr(sys, name).fileno() == number
        except (OSError, ValueError, AttributeError):
            same = False
        if not same:
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))


# Blocked in a child until it calls its function. Python could drop the exception of an inherited
# handler during the child's start, and the child would survive the signal.
ENDING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))


@dataclass(frozen=True)
class Child:
    """What a child needs besides its function: variables, files, result pipe, start method."""

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
            # Forked children exit this way without it.
            run_and_leave(main)
        main()


def _send(result: Connection, value: Any, name: str) -> None:
    result.send_bytes(pickled_result(value, name))
