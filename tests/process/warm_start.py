"""Agents whose zygote has torch imported from its start: forks of one process of the test run.

Each agent is a fresh interpreter, as ever. Its zygote alone is a fork, because the import of torch
takes two seconds of processor time and `make test` starts hundreds of agents. The nursery is the
process that has imported torch. It clones the agent as a child of the test process, forks the
zygote as a child of the agent, and lets the agent exec its command. The agent hands over what it
would have given to a zygote by exec: arguments, environment, folder and descriptors.

An agent whose zygote has died starts the next one by exec. Tests whose subject is how a zygote
starts use subprocess.Popen.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from elastane.process.kernel import die_with_parent, place_descriptors, show_program
from elastane.process.zygote import DEFAULT_PRELOAD, fitness, protocol
from elastane.testing import processes

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_MESSAGE_BYTES_MAX = 128 << 10
_ZYGOTE = ("-u", "-m", "elastane.process.zygote")
# What workers that save import, and what a zygote itself imports.
_MORE = ("torch.distributed.checkpoint", "tabulate", "elastane.process.zygote.server")
# Packages that take up to six seconds to import. A job that preloads one gets a nursery with it.
_LARGE = ("torch._dynamo", "lightning", "transformers.trainer", "accelerate")
# An environment in which torch would be imported otherwise needs a nursery of its own.
_NURSERIES_MAX = 6
_nurseries: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], _Nursery] = {}


class Popen(subprocess.Popen[bytes]):
    """A subprocess.Popen whose command, if it is `python -m elastane run`, has a warm zygote."""

    # The process at whose end the kernel kills the agent.
    dies_with: int | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, shell, *streams = rest
        pipes, start_new_session = streams[:6], streams[11]
        words, whole = [str(word) for word in args], dict(os.environ if env is None else env)
        plain = not (preexec_fn or pass_fds or shell) and close_fds
        nursery = _nursery_for(words, whole) if plain else None
        if nursery is None:
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        stdio = [p2cread if p2cread >= 0 else 0, c2pwrite if c2pwrite >= 0 else 1]
        stdio.append(errwrite if errwrite >= 0 else 2)
        request = {
            "words": words,
            "env": whole,
            "cwd": str(cwd or Path.cwd()),
            "session": start_new_session,
            "dies_with": self.dies_with,
        }
        try:
            self.pid = nursery.start(request, stdio)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _DyingPopen(Popen):
    dies_with = os.getpid()


_start_cold = processes.start


def start(words: Sequence[str], env: dict[str, str], output: int) -> subprocess.Popen[bytes]:
    """Start an agent as elastane.testing.processes.start does, which LocalCluster calls."""
    if _nursery_for(words, env) is None:
        return _start_cold(words, env, output)
    return _DyingPopen(
        list(words), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip


def _nursery_for(words: Sequence[str], env: Mapping[str, str]) -> _Nursery | None:
    """Return the nursery of an environment; None where the agent's zygote is to be an exec.

    A variable that one test alone sets gets no nursery.
    """
    frozen = {
        name: value
        for name, value in env.items()
        if name.startswith(fitness.FROZEN_PREFIXES) and name != "PYTHONUNBUFFERED"
    }
    preload = _preload(words, env)
    if (
        _CLONE is None
        or list(words[:4]) != [sys.executable, "-m", "elastane", "run"]
        or "--no-zygote" in words
        or preload[:1] != ["torch"]
        or frozen.get("OMP_NUM_THREADS") != "1"
        or not {"PYTHONSAFEPATH", "COVERAGE_PROCESS_CONFIG"}.isdisjoint(env)
        or any(
            name != "OMP_NUM_THREADS" and os.environ.get(name) != frozen[name] for name in frozen
        )
    ):
        return None
    large = tuple(name for name in _LARGE if name in preload)
    key = large, tuple(sorted(frozen.items()))
    if key not in _nurseries and len(_nurseries) < _NURSERIES_MAX:
        _nurseries[key] = _Nursery(frozen, large)
    return _nurseries.get(key)


def _preload(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return what the zygote is to import."""
    for word, following in itertools.pairwise([*words, ""]):
        if word == "--preload" or word.startswith("--preload="):
            return (word.partition("=")[2] or following).split(",")
    return env.get("ELASTANE_PRELOAD", ",".join(DEFAULT_PRELOAD)).split(",")


class _Nursery:
    """The test process's side of one nursery."""

    def __init__(self, frozen: Mapping[str, str], large: Sequence[str]) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock = mine
        with its:
            self._process = subprocess.Popen(
                # Room for the command lines of zygote and workers, where the kernel has no other.
                [sys.executable, "-u", __file__, str(its.fileno()), *large, " " * 2048],
                env={"PATH": os.environ["PATH"], **frozen},
                pass_fds=(its.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self._end)

    def start(self, request: Mapping[str, Any], stdio: Sequence[int]) -> int:
        socket.send_fds(self._sock, [json.dumps(request).encode()], list(stdio))
        return int(self._sock.recv(64))

    def _end(self) -> None:
        self._sock.close()
        self._process.wait()


def _nurse(fd: int, large: Sequence[str]) -> Any:
    """Serve requests; return None at their end, and in each zygote's worker its program."""
    import importlib

    from elastane.process.zygote.server import check_forkable, without_collections

    die_with_parent(os.getppid())
    with without_collections():
        for name in (*DEFAULT_PRELOAD, *_MORE, *large):
            importlib.import_module(name)
    assert not check_forkable()
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None, use_errno=True)
    sock = socket.socket(fileno=fd)
    while True:
        data, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES_MAX, 3)
        if not data:
            return None
        request = json.loads(data)
        # The stack is shared as after a fork: no flag CLONE_VM. The new process has our parent.
        pid = libc.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid < 0:
            sys.exit(f"clone: {os.strerror(ctypes.get_errno())}")
        if pid == 0:
            return _Birth(request, fds).run()
        sock.send(str(pid).encode())
        for one in fds:
            os.close(one)


class _Birth:
    """A clone of the nursery: forks the zygote, and becomes the agent."""

    def __init__(self, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        self.request, self.fds = request, fds

    def run(self) -> Any:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent = os.getpid()
        zygote = os.fork()
        if zygote != 0:
            self._become_agent(theirs, zygote)
        return _zygote(ours, agent)

    def _become_agent(self, channel: socket.socket, zygote: int) -> NoReturn:
        words = self.request["words"]
        try:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            if self.request["dies_with"] is not None:
                die_with_parent(self.request["dies_with"])
            if self.request["session"]:
                os.setsid()
            os.chdir(self.request["cwd"])
            wanted = {**dict(enumerate(self.fds)), 3: channel.fileno()}
            place_descriptors(wanted)
            argv = [words[0], __file__, "agent", str(zygote), *words[1:]]
            os.execve(words[0], argv, self.request["env"])
        finally:
            os._exit(127)


def _zygote(channel: socket.socket, agent: int) -> Any:
    """Wait for the agent's order, and be the zygote that it would have started."""
    from elastane.process.zygote.server import main

    die_with_parent(agent)
    os.setsid()
    received = socket.recv_fds(channel, _MESSAGE_BYTES_MAX, protocol.DESCRIPTORS_MAX)
    if not received[0]:
        os._exit(0)
    order, fds = json.loads(received[0]), received[1]
    place_descriptors(dict(zip(order["numbers"], fds, strict=True)))
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    argv = order["argv"]
    sys.path[0] = order["cwd"]
    sys.orig_argv[:], sys.argv[:] = argv, ["-m", *argv[4:]]
    show_program(argv, order["env"])
    return main(argv[4:])


def _run_agent(zygote: int, words: list[str]) -> None:
    """Be `python *words`, whose first zygote is the one that waits on descriptor 3."""
    from elastane.process.process import WorkerProcess, adopt
    from elastane.process.zygote import client

    assert words[0] == "-m", words
    channel = [socket.socket(fileno=3)]
    os.set_inheritable(3, False)
    launch = client.launch

    async def hand_over(
        argv: Sequence[str], env: Mapping[str, str], cwd: str, fds: Mapping[int, int]
    ) -> WorkerProcess:
        if not channel or tuple(argv[1:4]) != _ZYGOTE:
            return await launch(argv, env, cwd, fds)
        with channel.pop() as sock:
            message = {"argv": list(argv), "env": dict(env), "cwd": cwd, "numbers": list(fds)}
            socket.send_fds(sock, [json.dumps(message).encode()], list(fds.values()))
        return adopt(zygote)

    client.launch = hand_over  # type: ignore[assignment]
    sys.orig_argv[:] = [sys.executable, *words]
    sys.argv[:] = words[1:]
    sys.path[0] = str(Path.cwd())
    show_program(sys.orig_argv)
    runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        _run_agent(int(sys.argv[2]), sys.argv[3:])
    else:
        work = _nurse(int(sys.argv[1]), sys.argv[2:-1])
        while work is not None:
            work = work()
