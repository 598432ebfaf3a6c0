"""Agents and zygotes that are forks of one process of the test run, which has imported both.

`make test` starts hundreds of agents. An agent imports its modules in 0.4 s of processor
time, and its zygote torch in two. The fork server has imported both. It clones the agent as a child
of the test process, and the agent forks its zygote. The agent hands over what it would have given
to a zygote by exec: arguments, environment, folder and descriptors. It has none of torch's modules,
and the zygote none of the agent's. An agent of a host (`start_on_host`) or of a container
(`serve_containers`) enters its namespaces first.

An agent that is to have no zygote (`--no-zygote`), or one without torch, is a fork alone. It starts
such a zygote by exec, as an agent whose zygote has died does. Tests whose subject is how an agent
or a zygote starts use subprocess.Popen.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import json
import logging
import os
import platform
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from elastane.process.kernel import die_with_parent, place_descriptors, show_program
from elastane.process.program_end import exit_code, flush_and_end
from elastane.process.zygote import DEFAULT_PRELOAD, child, fitness, protocol
from elastane.process.zygote.child import Birth, note_birth
from elastane.process.zygote.server import check_forkable, without_collections
from elastane.testing import processes

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_CLONE_CHILD_CLEARTID = 0x200000
_CLONE_CHILD_SETTID = 0x1000000
# Namespaces of setns(2): mounts and processes; mounts, names, System V objects and network.
_MOUNTS_AND_PROCESSES = 0x20000 | 0x20000000
_SANDBOX = 0x20000 | 0x4000000 | 0x8000000 | 0x40000000
_CONTAINER_INIT = Path(__file__).parents[1] / "kubernetes/bed/programs/container_init.py"
_PR_GET_TID_ADDRESS = 40
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_PAGE = 2 << 20
_MESSAGE_BYTES_MAX = 128 << 10
_ZYGOTE = ("-u", "-m", "elastane.process.zygote")
_ZYGOTE_MODULES = ("elastane.process.zygote.server", "elastane.process.zygote.child")
_AGENT_MODULES = (
    *("elastane.cli.main", "elastane.cli.parser", "elastane.cli.run", "elastane.agent.main"),
    *("elastane.options.build", "elastane.options.settings", "encodings.idna", "tomllib"),
)
# Functions of the C library; fflush(NULL) writes what programs in C have printed.
_AT_EXIT = ("_exit", "fflush")
# What workers that save import.
_MODULES_OF_SAVES = ("torch.distributed.checkpoint", "tabulate")
# Packages that take up to six seconds to import. A job that preloads one gets a fork server that
# has imported it too.
_LARGE = ("torch._dynamo", "lightning", "transformers.trainer", "accelerate")
# An environment in which torch would be imported otherwise needs a fork server of its own.
_FORK_SERVERS_MAX = 6
# The environment of most jobs here, as far as it is read at an import.
_USUAL = {"OMP_NUM_THREADS": "1"}
_Kind = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
_fork_servers: dict[_Kind, _ForkServer] = {}


class Popen(subprocess.Popen[bytes]):
    """A subprocess.Popen that makes `python -m elastane run` and its zygote by forks."""

    # The process at whose end the kernel kills the agent.
    dies_with: int | None = None
    # A process in whose namespaces the agent is to run; None: in those of this process.
    host_pid: int | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, shell, *streams = rest
        pipes, start_new_session = streams[:6], streams[11]
        words, whole = [str(word) for word in args], dict(os.environ if env is None else env)
        plain = not (preexec_fn or pass_fds or shell) and close_fds
        server = _fork_server_for(words, whole) if plain else None
        if server is None:
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
            "host_pid": self.host_pid,
        }
        try:
            self.pid = server.start(request, stdio)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _DyingPopen(Popen):
    dies_with = os.getpid()


_start_cold = processes.start


def start(words: Sequence[str], env: dict[str, str], output: int) -> subprocess.Popen[bytes]:
    """Start an agent in place of elastane.testing.processes.start, which LocalCluster calls."""
    if _fork_server_for(words, env) is None:
        return _start_cold(words, env, output)
    return _DyingPopen(
        list(words), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip


def run(words: Sequence[str], timeout_s: float) -> None:
    """Run a job to its end, which has to be good; `words` are those after `elastane run`."""
    command = [sys.executable, "-m", "elastane", "run", *words]
    env = {**os.environ, **_USUAL}
    with Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        try:
            output, _ = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
    assert job.returncode == 0, output.decode(errors="replace")


def serve_containers() -> str:
    """Return the path of a socket where containers get agents that are forks; "" for none."""
    server = _fork_server_for([sys.executable, "-m", "elastane", "run"], _USUAL)
    return server.listen() if server is not None else ""


def start_on_host(
    words: Sequence[str], env: dict[str, str], output: int, host_pid: int
) -> subprocess.Popen[bytes] | None:
    """Start an agent in the namespaces of a process; None if it has to start by exec.

    The process returned is outside of them, has the agent as its only child, and ends as it does.
    """
    if "LD_PRELOAD" in env or _fork_server_for(words, env) is None:
        return None

    class HostPopen(Popen):
        pass

    HostPopen.host_pid = host_pid
    return HostPopen(
        list(words), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip


def _fork_server_for(words: Sequence[str], env: Mapping[str, str]) -> _ForkServer | None:
    """Return the fork server of an environment; None if the agent has to start by exec.

    An environment that only one test uses gets no fork server.
    """
    key = _kind(words, env)
    if key is not None and key not in _fork_servers and len(_fork_servers) < _FORK_SERVERS_MAX:
        _fork_servers[key] = _ForkServer(dict(key[1]), key[0])
    return _fork_servers.get(key) if key is not None else None


def _kind(words: Sequence[str], env: Mapping[str, str]) -> _Kind | None:
    """Return what a fork server of this agent has imported, and in which environment."""
    frozen = {
        name: value
        for name, value in env.items()
        if name.startswith(fitness.FROZEN_PREFIXES) and name != "PYTHONUNBUFFERED"
    }
    if (
        _CLONE is None
        or list(words[:4]) != [sys.executable, "-m", "elastane", "run"]
        or frozen.get("OMP_NUM_THREADS") != "1"
        or not {"PYTHONSAFEPATH", "COVERAGE_PROCESS_CONFIG"}.isdisjoint(env)
        or any(
            name != "OMP_NUM_THREADS" and os.environ.get(name) != frozen[name] for name in frozen
        )
    ):
        return None
    preload = _preload(words, env)
    large = tuple(name for name in _LARGE if name in preload) if _has_torch(words, env) else ()
    return large, tuple(sorted(frozen.items()))


def _has_torch(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether the agent is to have a zygote that imports torch."""
    return "--no-zygote" not in words and _preload(words, env)[:1] == ["torch"]


def _preload(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return what the zygote is to import."""
    for word, following in itertools.pairwise([*words, ""]):
        if word == "--preload" or word.startswith("--preload="):
            return (word.partition("=")[2] or following).split(",")
    return env.get("ELASTANE_PRELOAD", ",".join(DEFAULT_PRELOAD)).split(",")


class _ForkServer:
    """The test process's side of one fork server."""

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

    @functools.cache  # noqa: B019 - fork servers last as long as the test run
    def listen(self) -> str:
        """Return the path of a socket where containers get agents; see `container_init`."""
        folder = tempfile.mkdtemp(prefix="fork-server-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = f"{folder}/agents"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(64)
            self.start({"listen": True}, [listener.fileno()])
        return path

    def _end(self) -> None:
        self._sock.close()
        self._process.wait()


def _serve(fd: int, large: Sequence[str]) -> Any:
    """Serve requests; return None at their end, and in each clone its agent's or zygote's work."""
    die_with_parent(os.getppid())
    imported = _Imported(large)
    _skip_destructors()
    gc.collect()
    gc.freeze()
    _use_huge_pages()
    clone = _Clone()
    sock = socket.socket(fileno=fd)
    listeners: list[socket.socket] = []
    while True:
        ready = select.select([sock, *listeners], [], [])[0]
        if sock not in ready:
            connection, _ = ready[0].accept()
            if _in_orphan():
                for one in (sock, *listeners):
                    one.detach()  # other descriptors get their numbers
                return _NewContainer(connection, imported).run()
            connection.close()
            continue
        data, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES_MAX, 3)
        if not data:
            return None
        if "listen" in (request := json.loads(data)):
            listeners.append(socket.socket(fileno=fds[0]))
            sock.send(b"0")
            continue
        pid = clone()
        if pid == 0:
            sock.detach()  # another descriptor gets its number
            return _NewAgent(request, fds, imported).run()
        sock.send(str(pid).encode())
        for one in fds:
            os.close(one)


def _skip_destructors() -> None:
    """Let this process and its forks end without destructors of the libraries loaded by now.

    Torch's destructors take 0.3 s of processor time at the end of each worker. Destructors of
    libraries that are loaded later are called.
    """
    libc = ctypes.CDLL(None)
    address = {name: ctypes.cast(getattr(libc, name), ctypes.c_void_p) for name in _AT_EXIT}
    libc.on_exit(address["_exit"], None)
    libc.__cxa_atexit(address["fflush"], None, None)


def _use_huge_pages() -> None:
    """Put this process's memory into huge pages, where the kernel can: Linux 6.1 or later.

    A fork then copies a small part of the page tables: it takes 6 ms of processor time instead of
    30 ms, with its end.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()
        first, end = (int(part, 16) for part in words[0].split("-"))
        first, end = -(-first // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        is_data = words[1] == "rw-p" and words[5:] in ([], ["[heap]"])
        if is_data and first < end:
            libc.madvise(first, end - first, _MADV_HUGEPAGE)
            libc.madvise(first, end - first, _MADV_COLLAPSE)


class _Ending:
    """The end of a worker, without the teardown of modules, which copies all of their pages.

    The teardown takes 0.1 to 0.2 s of processor time. All that comes before it takes place: threads
    are joined, exit handlers run, streams are flushed. `leave` is registered as the first exit
    handler, so it runs last.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self.leave)

    def run(self, work: Any) -> None:
        """Run a worker's program, and note the exit code that the interpreter will give it."""
        try:
            while work is not None:
                work = work()
        except SystemExit as stop:
            self._code = exit_code(stop)
            raise
        except BaseException as error:
            self._code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
            raise
        self._code = 0

    def leave(self) -> None:
        """End the process of a worker whose program has ended; do nothing in another one."""
        if self._code is not None:
            flush_and_end(self._code)


class _Clone:
    """os.fork, but the new process is a child of this one's parent."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        # Where the C library keeps the thread's number, which a fork of its own would renew.
        self._thread_number = ctypes.c_void_p()
        if self._libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(self._thread_number), 0, 0, 0):
            sys.exit(f"prctl(PR_GET_TID_ADDRESS): {os.strerror(ctypes.get_errno())}")

    def __call__(self) -> int:
        api = ctypes.pythonapi
        flags = signal.SIGCHLD | _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
        number = self._thread_number
        api.PyOS_BeforeFork()
        # The stack is shared as after a fork: no flag CLONE_VM. The fourth argument is the number's
        # address on x86-64, the fifth on AArch64; the other one is not looked at.
        pid: int = self._libc.syscall(_CLONE, flags, 0, 0, number, number)
        if pid == 0:
            api.PyOS_AfterFork_Child()
            return 0
        api.PyOS_AfterFork_Parent()
        if pid < 0:
            sys.exit(f"clone: {os.strerror(ctypes.get_errno())}")
        return pid


class _Imported:
    """The modules of the fork server; an agent hides the zygote's modules, and the reverse."""

    def __init__(self, large: Sequence[str]) -> None:
        with without_collections():
            self._import(_ZYGOTE_MODULES)
            known = {name: set(vars(module)) for name, module in sys.modules.items()}
            self._import(_AGENT_MODULES)
            agents, self._filters = set(sys.modules), [*warnings.filters]
            # A zygote imports ours itself: those here refer to modules that are hidden from it, and
            # it would have these twice.
            preload = [name for name in DEFAULT_PRELOAD if name.partition(".")[0] != "elastane"]
            self._import((*preload, *_MODULES_OF_SAVES, *large))
        assert not check_forkable()
        ours = {name for name in agents if name.partition(".")[0] == "elastane"}
        self._agents_alone = ours - known.keys()
        self._torchs_alone = {
            name
            for name in sys.modules.keys() - agents
            if name.partition(".")[0] not in sys.stdlib_module_names
        }
        # What an import of a submodule, or a name that is imported when it is first used, adds.
        self._added = {
            name: set(vars(sys.modules[name])) - known[name] for name in ours & known.keys()
        }
        self._hidden: dict[str, ModuleType] = {}

    @staticmethod
    def _import(names: Iterable[str]) -> None:
        for name in names:
            importlib.import_module(name)

    def be_agents(self) -> None:
        """Keep only an agent's modules, warnings and exit handlers."""
        self._hide(self._torchs_alone)
        warnings.filters[:] = self._filters  # type: ignore[index]
        atexit._clear()
        atexit.register(logging.shutdown)

    def be_zygotes(self) -> None:
        """Keep only a zygote's modules."""
        self._hide(self._agents_alone)
        for name, added in self._added.items():
            for one in added:
                delattr(sys.modules[name], one)

    def _hide(self, names: Iterable[str]) -> None:
        self._hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
        # The interpreter would take them apart when it ends, which takes 0.06 s.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._hidden))


class _WaitingZygote(NamedTuple):
    """A fork that becomes the agent's zygote, and the descriptor by which the agent orders it."""

    pid: int
    channel: int


class _NewAgent:
    """A clone of the fork server: forks a zygote, if there is to be one, and becomes the agent."""

    def __init__(self, request: Mapping[str, Any], fds: Sequence[int], imported: _Imported) -> None:
        self.request, self.fds, self._imported = request, fds, imported

    def run(self) -> Any:
        if self.request["host_pid"] is not None:
            _enter_host(self.request["host_pid"])
        note = note_birth()
        zygote: _WaitingZygote | None = None
        if _has_torch(self.request["words"], self.request["env"]):
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours, theirs = (one.detach() for one in pair)
            agent, pid = os.getpid(), os.fork()
            if pid == 0:
                self._imported.be_zygotes()
                return _zygote(ours, agent)
            zygote = _WaitingZygote(pid, theirs)
        try:
            return self._become_agent(zygote, note)
        except BaseException:
            traceback.print_exc()
            os._exit(127)

    def _become_agent(self, zygote: _WaitingZygote | None, note: Birth) -> Any:
        words, env = self.request["words"], self.request["env"]
        if self.request["dies_with"] is not None:
            die_with_parent(self.request["dies_with"])
        if self.request["session"]:
            os.setsid()
        os.chdir(self.request["cwd"])
        channel = {} if zygote is None else {3: zygote.channel}
        place_descriptors({**dict(enumerate(self.fds)), **channel})
        os.environ.clear()
        os.environ.update(env)
        time.tzset()
        self._imported.be_agents()
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.reconfigure(write_through=False)  # type: ignore[union-attr]
        child._renew_streams()
        child._renew_modules()
        sys.orig_argv[:], sys.argv[:] = words, words[2:]
        sys.path[:] = [str(Path.cwd()), *note.path]
        importlib.invalidate_caches()
        show_program(words, env)
        main = sys.modules["__main__"] = ModuleType("__main__")
        vars(main).clear()
        vars(main).update(note.main)
        return lambda: _run_agent(None if zygote is None else zygote.pid, words[1:])


def _in_orphan() -> bool:
    """Fork twice; return whether this is the second fork, whose end this process does not await."""
    if child := os.fork():
        os.waitpid(child, 0)
        return False
    if os.fork():
        os._exit(0)
    return True


class _NewContainer:
    """Makes an agent as process 1 of a container, in the namespaces of the program that asks.

    That program, `container_init`, waits for the agent's end, and this process ends the agent if
    that program is killed.
    """

    def __init__(self, connection: socket.socket, imported: _Imported) -> None:
        self._asking, self._imported = connection, imported

    def run(self) -> Any:
        data, fds, _, _ = socket.recv_fds(self._asking, _MESSAGE_BYTES_MAX, 1)
        told = json.loads(Path(data.decode()).read_text())
        kind = _kind(told["argv"], {"PATH": "", **told["env"]})
        if kind is None or dict(kind[1]) != _USUAL or kind[0]:
            os._exit(0)  # It starts the agent by exec.
        container = runpy.run_path(_CONTAINER_INIT, run_name="container_init")
        pid, _, _ = struct.unpack(
            "3i", self._asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        _enter_namespaces(pid, _SANDBOX)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_MOUNTS_AND_PROCESSES):
            sys.exit(f"unshare(2): {os.strerror(ctypes.get_errno())}")
        agent = os.fork()
        if agent:
            self._wait(agent)
        die_with_parent(0)  # which is outside of this namespace
        self._asking.detach()
        try:
            container["enter"](told)
        except OSError as error:
            os.write(fds[0], f"the container cannot start: {error}\n".encode())
            os._exit(128)
        request = {"words": told["argv"], "env": told["env"], "cwd": told["cwd"], "session": True}
        stdio = [os.open(os.devnull, os.O_RDONLY), fds[0], os.dup(fds[0])]
        return _NewAgent(
            {**request, "dies_with": None, "host_pid": None}, stdio, self._imported
        ).run()

    def _wait(self, agent: int) -> NoReturn:
        self._asking.send(str(agent).encode())
        ended = os.pidfd_open(agent)
        if self._asking in select.select([self._asking, ended], [], [])[0]:
            os.kill(agent, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        with contextlib.suppress(OSError):
            self._asking.send(str(code).encode())
        os._exit(0)


def _enter_namespaces(pid: int, kinds: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    if libc.setns(process, kinds):
        sys.exit(f"setns(2): {os.strerror(ctypes.get_errno())}")
    os.close(process)


def _enter_host(pid: int) -> None:
    """Fork into the namespaces of a process; return in the fork, and end as it does."""
    _enter_namespaces(pid, _SANDBOX | _MOUNTS_AND_PROCESSES)
    child = os.fork()  # only a fork is in the namespace of processes
    if child == 0:
        return
    place_descriptors({})
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _zygote(descriptor: int, agent: int) -> Any:
    """Wait for the agent's order, then run as the zygote that it would have started."""
    from elastane.process.zygote.server import main

    die_with_parent(agent)
    os.setsid()
    channel = socket.socket(fileno=descriptor)
    received = socket.recv_fds(channel, _MESSAGE_BYTES_MAX, protocol.DESCRIPTORS_MAX)
    channel.detach()
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
    return functools.partial(_ending.run, main(argv[4:]))


def _run_agent(zygote: int | None, words: list[str]) -> None:
    """Run `python *words`, whose first zygote, if given, is the one that waits on descriptor 3."""
    assert words[0] == "-m", words
    if zygote is not None:
        _hand_over_to(zygote)
    runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]


def _hand_over_to(zygote: int) -> None:
    """Let the agent's first zygote be the one that waits on descriptor 3."""
    from elastane.process.process import WorkerProcess, adopt
    from elastane.process.zygote import client

    os.set_inheritable(3, False)
    channel = [socket.socket(fileno=3)]
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


if __name__ == "__main__":
    _ending = _Ending()
    work = _serve(int(sys.argv[1]), sys.argv[2:-1])
    while work is not None:
        work = work()
