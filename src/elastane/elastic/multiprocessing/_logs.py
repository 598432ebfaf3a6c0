"""Where the output of child processes goes: the data classes, and the default choice of files."""

from __future__ import annotations

import importlib
import os
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import EnumType, IntFlag
from pathlib import Path
from typing import Any

from elastane.errors import UsageError
from elastane.process.files import safe_name
from elastane.process.streams.plan import parse_std_map

_CONSOLE = ""


class _CallsFunctions(EnumType):
    """Makes `Std(entrypoint=...)` a run of a function; `Std(3)` stays a mask."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "entrypoint" not in kwargs:
            return super().__call__(*args, **kwargs)
        # By name: the launcher is built on this package, and is needed only here.
        launcher = importlib.import_module("elastane.elastic.launcher.function_run")
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
