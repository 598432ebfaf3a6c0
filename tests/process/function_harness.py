"""Programs that call `elastane.launch`, each in its own process, and their remaining processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from process_harness import DEADLINE_S, until, worker_environment
from supervise import MARK, alive, command_line, marked

import elastane

# What a program's functions tell their test by: files that appear whole.
HEAD = """\
import os, signal, sys, time
import elastane
from pathlib import Path

def tell(name, text=""):
    path = Path(os.environ["HERE"], name)
    part = path.with_name(f"part.{name}")
    part.write_text(str(text))
    part.rename(path)

def wait_for(name):
    while not Path(os.environ["HERE"], name).exists():
        time.sleep(0.01)

def hang():
    while True:
        time.sleep(600)

"""


class Program:
    """One caller, and the processes that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tmp = folder / "tmp"
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, argv: list[str], out_fd: int | None, **env: str) -> None:
        """Start it, its output in the files out and err, or out to a descriptor."""
        self.tmp.mkdir(exist_ok=True)
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                argv,
                cwd=self.folder,
                env=self.environment(**env),
                stdin=subprocess.DEVNULL,
                stdout=out if out_fd is None else out_fd,
                stderr=err,
                start_new_session=True,
            )

    def environment(self, **more: str) -> dict[str, str]:
        own = {
            MARK: self.mark,
            "HERE": str(self.folder),
            "TMPDIR": str(self.tmp),
            "ELASTANE_NO_ZYGOTE": "1",
        }
        return worker_environment(**{**own, **more})

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Return its exit code; if it does not end in time, fail with its output."""
        assert self.process is not None
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it lives on after {deadline_s} s\n{self.err}") from None

    def send(self, signum: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signum)

    def told(self, name: str) -> str:
        """Wait for the value that a function reported under `name`, and return it."""
        path = self.folder / name
        until(lambda: path.exists() or not self.is_alive, f"{name} is told\n{self.err}")
        assert path.exists(), f"{name} is not told\n{self.err}"
        return path.read_text()

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def agent(self) -> int:
        """Return the pid of its one agent."""
        (pid,) = {pid for pid in marked(self.mark) if "elastane.cli.called" in command_line(pid)}
        return pid

    def gone(self) -> None:
        """Wait until no process that it started is left."""
        until(lambda: not marked(self.mark), "nothing of the program is left")

    def folders(self) -> list[Path]:
        """Return the existing folders of calls."""
        return sorted(self.tmp.glob("elastane-call-*"))

    def kill_all(self) -> None:
        """Kill the remaining processes by pid."""
        for pid in marked(self.mark):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(DEADLINE_S)


@contextmanager
def program(folder: Path, *bodies: str, out: int | None = None, **env: str) -> Iterator[Program]:
    """Run a script that calls."""
    path = folder / "program.py"
    path.write_text(HEAD + "".join(map(textwrap.dedent, bodies)))
    with ran(folder, [sys.executable, str(path)], out, **env) as one:
        yield one


@contextmanager
def ran(folder: Path, argv: list[str], out: int | None = None, **env: str) -> Iterator[Program]:
    """Run a command that calls."""
    one = Program(folder)
    try:
        one.start(argv, out, **env)
        yield one
    finally:
        one.kill_all()


@contextmanager
def calls(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[int, Any]]]:
    """Yield `elastane.launch` for this process, with plain workers; end all their processes."""
    tmp = folder / "tmp"
    tmp.mkdir()
    patch.setenv("TMPDIR", str(tmp))
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setattr(tempfile, "tempdir", None)
    patch.chdir(folder)

    def launch(fn: Any, args: Any = (), kwargs: Any = None, **options: Any) -> dict[int, Any]:
        return elastane.launch(fn, args, kwargs, **{"nproc": 1, "no_zygote": True, **options})

    yield launch
    assert list(tmp.glob("elastane-call-*")) == []
