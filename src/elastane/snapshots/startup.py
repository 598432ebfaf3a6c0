"""Starts a snapshot server: its command, its environment, and the descriptors it inherits.

An agent starts and owns the server of its node; a worker without an agent starts one of its own.
Neither carries an agent's process mark: the server ends by itself soon after its owner, and
performs the final flush until then. How it fails: OSError.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

# The socket's path, in the environment of an agent's workers.
SERVER_VARIABLE = "ELASTANE_SNAPSHOT_SERVER"
NODE, OWN = "node", "own"
# The numbers under which a snapshot server finds its descriptors.
CONTROL_FD, LISTENER_FD, OWN_FD = 3, 4, 3
_HIGH = 16
# Variables for one worker only, and the process mark by which an agent's processes are ended.
_NOT_ITS = (
    "ELASTANE_PROCESS_MARK",
    "ELASTANE_STATUS_PAGE_FD",
    "ELASTANE_CONTROL_FD",
    SERVER_VARIABLE,
)
# Not -m, which would look in the current folder first, where a module of the user may have the name
# of one of ours. A worker's own server is detached, so that no process has to wait for it.
_CODE = (
    "import os, sys;"
    "sys.argv[2] == 'own' and os.fork() and os._exit(0);"
    "sys.path[:] = [path for path in sys.path if path] + [sys.argv[1]];"
    "from elastane.snapshots.server import main; main(sys.argv[2:])"
)


def start_node_server(
    control: socket.socket, listener: socket.socket, environment: Mapping[str, str]
) -> int:
    """Start the snapshot server of a node; returns its pid, a child of this process."""
    ends = {CONTROL_FD: control.fileno(), LISTENER_FD: listener.fileno()}
    return _spawn(NODE, ends, environment)


def start_own_server(environment: Mapping[str, str]) -> socket.socket:
    """Start a snapshot server for this process alone; returns the connection to it."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with its:
            pid = _spawn(OWN, {OWN_FD: its.fileno()}, environment)
        with contextlib.suppress(ChildProcessError):  # Another part of this process reaped it.
            status = os.waitpid(pid, 0)[1]
            code = os.waitstatus_to_exitcode(status)
            if code:
                raise OSError(f"a snapshot server could not be started: exit code {code}")
    except BaseException:
        mine.close()
        raise
    return mine


def _spawn(kind: str, descriptors: Mapping[int, int], environment: Mapping[str, str]) -> int:
    root = str(Path(__file__).resolve().parents[2])
    env = {name: value for name, value in environment.items() if name not in _NOT_ITS}
    high = {
        number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for number, fd in descriptors.items()
    }
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", _CODE, root, kind],
            env,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, 2, 1),
                *((os.POSIX_SPAWN_DUP2, fd, number) for number, fd in high.items()),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE,),
        )
    finally:
        for fd in high.values():
            os.close(fd)
