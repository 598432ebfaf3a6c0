"""Several child processes as one: started together, waited for together, ended together.

Owns their supervision in the user's own process, and the choice of the files for their output. All
succeed, or the first failure ends all.

torch's module is not used: it polls, and its child processes outlive a killed parent. Here exits
are noticed at once, by pidfd, and large return values cannot deadlock. Children that are ended
because another failed do not count as failures. Source:
torch.distributed.elastic.multiprocessing.api.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import EnumType, IntFlag
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from elastane.elastic.multiprocessing._children import (
    ENDING,
    KILL_WAIT_S,
    ByValue,
    Child,
    bind_child,
    end_all,
    main_not_imported,
    must_go_by_value,
    of_main_by_value,
    run_callable,
    wait_any,
)
from elastane.elastic.multiprocessing.errors import ProcessFailure
from elastane.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
    get_subprocess_handler,
)
from elastane.elastic.multiprocessing.tail_log import TailLog
from elastane.errors import UsageError
from elastane.functions.payload import load_value, name_of
from elastane.process.files import safe_name
from elastane.process.streams.plan import parse_std_map

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "get_std_cm",
    "to_map",
]
_log = logging.getLogger(__name__)
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_CONSOLE = ""


class _CallsFunctions(EnumType):
    """Makes `Std(entrypoint=...)` a run of a function; `Std(3)` stays a mask."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "entrypoint" not in kwargs:
            return super().__call__(*args, **kwargs)
        # By name: the launcher is built on this package, and is needed only here.
        launcher = importlib.import_module("elastane.elastic.launcher.api")
        return launcher.FunctionRun(*args, **kwargs)


class Std(IntFlag, metaclass=_CallsFunctions):
    """Standard streams, as a mask.

    `Std(entrypoint=train, log_dir="logs", max_restarts=3).run()` calls a function in workers on
    this machine, with both streams shown and saved; see FunctionRun.
    """

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Parse `3`, or by local rank `0:3,1:2` (ranks of several digits too); else ValueError."""
        try:
            parse_std_map(vm, 0)
        except UsageError as error:
            raise ValueError(f"{vm} is neither a stream mask nor a map: {error}") from None
        if ":" not in vm:
            return cls(int(vm))
        pairs = (pair.split(":") for pair in vm.split(","))
        return {int(rank): cls(int(value)) for rank, value in pairs}


def to_map(val_or_map: Std | dict[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return a value for each local rank; ranks missing in a map get NONE."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}


@dataclass
class LogsDest:
    """Files by local rank; an empty path is the console."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = field(default_factory=str)
    filtered_stderr: str = field(default_factory=str)


class LogsSpecs(ABC):
    """Chooses the files of each attempt."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files for workers with these environments, by local rank."""

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The folder that contains all files."""


class DefaultLogsSpecs(LogsSpecs):
    """`<log_dir>/<run id>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}`.

    `log_dir` is created if missing. None means a temporary folder, and /dev/null means no files. If
    an attempt's folder exists, it is kept and the next one gets another name. torch deletes it, and
    with it the reason of the previous failure.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if log_dir != os.devnull:
            log_dir = log_dir or tempfile.mkdtemp(prefix="torchelastic_")
            if Path(log_dir).is_file():
                raise NotADirectoryError(f"log_dir: {log_dir} is a file")
            Path(log_dir).mkdir(parents=True, exist_ok=True)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._run_log_dir: str | None = None

    @property
    def root_log_dir(self) -> str:
        """See LogsSpecs."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See LogsSpecs. Sets TORCHELASTIC_ERROR_FILE in each environment."""
        count = len(envs)
        dest = LogsDest(
            stdouts=dict.fromkeys(range(count), _CONSOLE),
            stderrs=dict.fromkeys(range(count), _CONSOLE),
        )
        if self._root_log_dir == os.devnull:
            for rank, env in envs.items():
                dest.tee_stdouts[rank] = dest.tee_stderrs[rank] = os.devnull
                dest.error_files[rank] = os.devnull
                env["TORCHELASTIC_ERROR_FILE"] = ""
            dest.filtered_stdout = dest.filtered_stderr = os.devnull
            return dest
        attempt = self._attempt_dir(envs.get(0, {}))
        redirects, tees = to_map(self._redirects, count), to_map(self._tee, count)
        for rank, env in envs.items():
            folder = attempt / str(rank)
            folder.mkdir()
            kept = (redirects[rank] | tees[rank], tees[rank])
            self._choose(
                dest.stdouts, dest.tee_stdouts, rank, Std.OUT, (folder / "stdout.log", kept)
            )
            self._choose(
                dest.stderrs, dest.tee_stderrs, rank, Std.ERR, (folder / "stderr.log", kept)
            )
            dest.error_files[rank] = env["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
        dest.filtered_stdout = str(attempt / "filtered_stdout.log")
        dest.filtered_stderr = str(attempt / "filtered_stderr.log")
        return dest

    def _choose(
        self,
        files: dict[int, str],
        tees: dict[int, str],
        rank: int,
        std: Std,
        choice: tuple[Path, tuple[Std, Std]],
    ) -> None:
        path, (kept, teed) = choice
        if std in kept:
            files[rank] = str(path)
        hidden = self._local_ranks_filter and rank not in self._local_ranks_filter
        if std in teed and not hidden:
            tees[rank] = str(path)
        if hidden and files[rank] == _CONSOLE:
            files[rank] = os.devnull

    def _attempt_dir(self, env: dict[str, str]) -> Path:
        run_id = env.get("TORCHELASTIC_RUN_ID", "test_run_id")
        if self._run_log_dir is None:
            prefix = f"{safe_name(run_id)}_"
            self._run_log_dir = tempfile.mkdtemp(prefix=prefix, dir=self._root_log_dir)
        base = Path(self._run_log_dir) / f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        names = [base, *(base.with_name(f"{base.name}.{n}") for n in range(1, 1000))]
        folder = next(path for path in names if not path.exists())
        folder.mkdir()
        return folder

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return False
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


class SignalException(Exception):
    """A signal that ends this process, raised in its main thread."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


def _raise_signal(signum: int, frame: FrameType | None) -> None:
    del frame
    name = signal.Signals(signum)
    raise SignalException(f"Process {os.getpid()} got signal: {name}", sigval=name)


@dataclass
class RunProcsResult:
    """How a run ended, by local rank: values of callables, or failures; and the output files."""

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether any process failed."""
        return bool(self.failures)


class PContext(ABC):
    """A set of child processes: `start` once, then `wait` until it returns a result, or `close`."""

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        self.name = name
        self.nprocs = len(args)
        dest = logs_specs.reify(envs)
        _check_ranks(dest.stdouts, self.nprocs, "stdouts")
        _check_ranks(dest.stderrs, self.nprocs, "stderrs")
        self.entrypoint, self.args, self.envs = entrypoint, args, envs
        self.stdouts, self.stderrs, self.error_files = dest.stdouts, dest.stderrs, dest.error_files
        self._tail_logs = [
            TailLog(name, dest.tee_stdouts, sys.stdout, log_line_prefixes),
            TailLog(name, dest.tee_stderrs, sys.stderr, log_line_prefixes),
        ]
        self._filtered: list[TextIO] = []
        for needles, files, path in (
            (duplicate_stdout_filters, dest.tee_stdouts, dest.filtered_stdout),
            (duplicate_stderr_filters, dest.tee_stderrs, dest.filtered_stderr),
        ):
            if needles:
                self._filter(needles, files, path, log_line_prefixes)
        # Timeout for stopping the others after a failure; an agent sets its own.
        self.close_timeout_s = 30
        self._closing = threading.Lock()
        self._closed = False

    def _filter(
        self, needles: list[str], files: dict[int, str], path: str, prefixes: dict[int, str] | None
    ) -> None:
        target = open(path, "w", errors="replace", buffering=1)  # noqa: SIM115, PTH123 - by close
        self._filtered.append(target)
        wanted = tuple(needles)
        self._tail_logs.append(
            TailLog(
                self.name,
                files,
                target,
                prefixes,
                log_line_filter=lambda line: any(needle in line for needle in wanted),
            )
        )

    def start(self) -> None:
        """Start all processes; ValueError on a second call.

        In the main thread, terminating signals become a SignalException there, as in torch. In
        other threads, signals are left to the caller.
        """
        if threading.current_thread() is threading.main_thread():
            _handle_signals(os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _SIGNALS))
        self._start()
        for tail in self._tail_logs:
            tail.start()

    @abstractmethod
    def _start(self) -> None:
        """Start the processes."""

    @abstractmethod
    def _poll(self) -> RunProcsResult | None:
        """Return the result if all have succeeded or one has failed, else None."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Return the pid of each local rank."""

    @abstractmethod
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """End the remaining processes, by a signal and after `timeout` seconds by SIGKILL."""

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Return the result, or None after `timeout` seconds (negative: never; 0: do not wait).

        Exits are noticed at once; `period` only bounds the time between two polls.
        """
        end_s = time.monotonic() + timeout if timeout >= 0 else float("inf")
        while True:
            result = self._poll()
            left_s = end_s - time.monotonic()
            if result is not None or left_s <= 0:
                return result
            wait_any(list(self.pids().values()), min(period, left_s))

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End all processes and their descendants. Idempotent."""
        with self._closing:
            self._close(death_sig=death_sig or signal.SIGTERM, timeout=timeout)
            if self._closed:
                return
            self._closed = True
            for tail in self._tail_logs:
                tail.stop()
            for target in self._filtered:
                target.close()

    def _failure(self, local_rank: int, pid: int, exitcode: int) -> ProcessFailure:
        return ProcessFailure(local_rank, pid, exitcode, self.error_files.get(local_rank, ""))

    def _result(
        self, failures: dict[int, ProcessFailure], values: dict[int, Any] | None = None
    ) -> RunProcsResult:
        if failures:
            first = min(failures.values(), key=lambda failure: failure.time_ns)
            _log.error(
                "failed (exitcode: %s) local_rank: %s (pid: %s) of %s",
                first.exitcode,
                first.local_rank,
                first.pid,
                self.entrypoint,
            )
        return RunProcsResult(values or {}, failures, self.stdouts, self.stderrs)


def get_std_cm(
    std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Return a context that redirects to `std_rd`, or that does nothing if it is empty."""
    return redirect_fn(std_rd) if std_rd else nullcontext()


class MultiprocessContext(PContext):
    """Child processes that each call a function; return values are by local rank."""

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
        self.start_method = start_method
        self._numa_options = numa_options
        self._processes: dict[int, Any] = {}
        self._results: dict[int, Connection] = {}
        self._values: dict[int, Any] = {}

    def _start(self) -> None:
        if self._processes:
            raise ValueError("start() was called before: the processes are there already")
        context: Any = multiprocessing.get_context(self.start_method)
        on_main = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if on_main and self.start_method != "forkserver" else 0
        assert callable(self.entrypoint)
        by_value = must_go_by_value(self.entrypoint, self.start_method)
        fn = ByValue(self.entrypoint) if by_value else self.entrypoint
        for rank in range(self.nprocs):
            receiver, sender = context.Pipe(duplex=False)
            files = (self.stdouts[rank], self.stderrs[rank])
            child = Child(self.envs[rank], files, sender, parent, self.start_method)
            args = tuple(map(of_main_by_value, self.args[rank])) if by_value else self.args[rank]
            process = context.Process(target=run_callable, args=(fn, args, child))
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            try:
                with main_not_imported() if by_value else nullcontext():
                    process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            sender.close()
            bind_child(process.pid, rank, self._numa_options)
            self._processes[rank], self._results[rank] = process, receiver

    def pids(self) -> dict[int, int]:
        """See PContext."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def _poll(self) -> RunProcsResult | None:
        failures: dict[int, ProcessFailure] = {}
        for rank, process in self._processes.items():
            self._receive(rank)
            code = process.exitcode
            if code is None:
                continue
            self._receive(rank)
            if code != 0 or rank not in self._values:
                failures[rank] = self._failure(rank, process.pid, code)
        if failures:
            self.close(timeout=self.close_timeout_s)
            return self._result(failures)
        if len(self._values) < self.nprocs or any(
            process.exitcode is None for process in self._processes.values()
        ):
            return None
        self.close()
        return self._result({}, dict(self._values))

    def _receive(self, rank: int) -> None:
        """Receive a value that is available: a large one fills its pipe and blocks its sender.

        ConfigurationError if this process cannot load it.
        """
        with contextlib.suppress(EOFError, OSError):
            if rank not in self._values and self._results[rank].poll():
                content = self._results[rank].recv_bytes()
                self._values[rank] = load_value(content, name_of(self.entrypoint), rank)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        pids = [p.pid for p in self._processes.values() if p.exitcode is None]
        end_all(pids, death_sig, timeout)
        for process in self._processes.values():
            process.join(KILL_WAIT_S)


class SubprocessContext(PContext):
    """Child processes that each run a command."""

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
        self._numa_options = numa_options
        self.subprocess_handlers: dict[int, SubprocessHandler] = {}

    def _start(self) -> None:
        if self.subprocess_handlers:
            raise ValueError("start() was called before: the processes are there already")
        assert isinstance(self.entrypoint, str)
        for rank in range(self.nprocs):
            self.subprocess_handlers[rank] = get_subprocess_handler(
                entrypoint=self.entrypoint,
                args=self.args[rank],
                env=self.envs[rank],
                stdout=self.stdouts[rank],
                stderr=self.stderrs[rank],
                local_rank_id=rank,
                numa_options=self._numa_options,
            )

    def pids(self) -> dict[int, int]:
        """See PContext."""
        return {rank: handler.proc.pid for rank, handler in self.subprocess_handlers.items()}

    def _poll(self) -> RunProcsResult | None:
        codes = {rank: h.proc.poll() for rank, h in self.subprocess_handlers.items()}
        failures = {
            rank: self._failure(rank, self.subprocess_handlers[rank].proc.pid, code)
            for rank, code in codes.items()
            if code
        }
        if not failures and any(code is None for code in codes.values()):
            return None
        self.close(timeout=self.close_timeout_s)
        # A command has no return value, so a successful one returns None.
        return self._result(failures, {} if failures else dict.fromkeys(codes))

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        processes = [handler.proc for handler in self.subprocess_handlers.values()]
        end_all([p.pid for p in processes if p.poll() is None], death_sig, timeout)
        for handler in self.subprocess_handlers.values():
            handler.close(signal.SIGKILL)  # kills processes that the command left in its session
            with contextlib.suppress(Exception):
                handler.proc.wait(KILL_WAIT_S)


def _check_ranks(files: dict[int, str], count: int, what: str) -> None:
    if set(files) != set(range(count)):
        raise RuntimeError(
            f"{what}: local rank mapping mismatch, expected {set(range(count))}, got {set(files)}"
        )


def _handle_signals(names: str) -> None:
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            signal.signal(signal.Signals[name], _raise_signal)
        except (KeyError, ValueError, OSError):
            _log.warning("no signal %r: it is not handled", name)
