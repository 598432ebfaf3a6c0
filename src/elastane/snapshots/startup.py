"""How a keeper is started: its command, its environment, what it inherits.

Two kinds: a node's, which an agent starts and owns, and a worker's own, where there is no agent.
Neither carries an agent's leash: it ends by itself, soon after those whom it serves, and until then
it writes what they left. How it fails: OSError.
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
KEEPER_VARIABLE = "ELASTANE_KEEPER"
NODE, OWN = "node", "own"
# What a keeper finds its descriptors under.
CONTROL_FD, LISTENER_FD, OWN_FD = 3, 4, 3
_HIGH = 16
# Variables that mean something to one worker, or would have a keeper ended with its agent's job.
_NOT_ITS = ("ELASTANE_LEASH", "ELASTANE_PAGE_FD", "ELASTANE_LINE_FD", KEEPER_VARIABLE)
# Not -m: that would look into the current folder first, where a module of the user's may have the
# name of one of ours. A worker's own keeper is nobody's child, so that nobody has to wait for it.
_CODE = (
    "import os, sys;"
    "sys.argv[2] == 'own' and os.fork() and os._exit(0);"
    "sys.path[:] = [path for path in sys.path if path] + [sys.argv[1]];"
    "from elastane.snapshots.main import main; main(sys.argv[2:])"
)


def start_node_keeper(
    control: socket.socket, listener: socket.socket, environment: Mapping[str, str]
) -> int:
    """Start the keeper of a node; returns its pid, which is this process's child."""
    ends = {CONTROL_FD: control.fileno(), LISTENER_FD: listener.fileno()}
    return _spawn(NODE, ends, environment)


def start_own_keeper(environment: Mapping[str, str]) -> socket.socket:
    """Start a keeper for this process alone; returns the connection to it."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with its:
            pid = _spawn(OWN, {OWN_FD: its.fileno()}, environment)
        with contextlib.suppress(ChildProcessError):  # somebody here waits for all children
            status = os.waitpid(pid, 0)[1]
            code = os.waitstatus_to_exitcode(status)
            if code:
                raise OSError(f"a keeper of snapshots could not be started: exit code {code}")
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
