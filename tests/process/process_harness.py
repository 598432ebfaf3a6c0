"""Commands for workers, and the same program run both ways: forked, and by hand."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polling import look

from elastane.process.execspawn import command_line
from elastane.process.process import Spawner, WorkerCommand, WorkerKind, WorkerProcess

SCRIPTS = Path(__file__).parent / "scripts"
# Generous: the bound of a test that fails, on a machine that does other things as well.
DEADLINE_S = 90.0


@dataclass(frozen=True)
class Ended:
    """The output and exit code of a program."""

    code: int
    out: str
    err: str


@dataclass
class Told:
    """The reports of a spawner."""

    heard: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, kind: str, reason: str) -> None:
        self.heard.append((kind, reason))

    def of(self, kind: str) -> list[str]:
        return [reason for heard, reason in self.heard if heard == kind]


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for `condition`, which runs outside any loop."""
    end = time.monotonic() + deadline_s
    while (pause_s := look(condition, 0.005)) is not None:
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(pause_s)


async def eventually(
    condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S
) -> None:
    """Wait for `condition` and let the loop run meanwhile."""
    end = time.monotonic() + deadline_s
    while (pause_s := look(condition, 0.005)) is not None:
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(pause_s)


def worker_environment(**more: str) -> dict[str, str]:
    """Return the environment that a launcher gives, without this test run's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "HOME", "VIRTUAL_ENV", "TMPDIR", "COVERAGE_PROCESS_CONFIG")
    }
    return {**kept, "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", "PYTHONFAULTHANDLER": "1", **more}


def command(
    kind: WorkerKind,
    target: str | Path,
    *args: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdio: Sequence[int] = (0, 1, 2),
    fds: Mapping[int, int] | None = None,
) -> WorkerCommand:
    return WorkerCommand(
        kind=kind,
        target=str(target),
        args=args,
        env=worker_environment() if env is None else env,
        cwd=str(cwd or SCRIPTS),
        stdin=stdio[0],
        stdout=stdio[1],
        stderr=stdio[2],
        fds=fds or {},
    )


async def run_spawned(spawner: Spawner, wanted: WorkerCommand, folder: Path) -> Ended:
    """Run a worker with its output in files."""
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(folder / "out", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    err = os.open(folder / "err", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    try:
        changed = WorkerCommand(
            wanted.kind,
            wanted.target,
            wanted.args,
            wanted.env,
            wanted.cwd,
            null,
            out,
            err,
            wanted.fds,
        )
        process = await spawner.spawn(changed)
    finally:
        for fd in (null, out, err):
            os.close(fd)
    code = await asyncio.wait_for(process.wait(), DEADLINE_S)
    return Ended(code, (folder / "out").read_text(), (folder / "err").read_text())


def run_plain(wanted: WorkerCommand, folder: Path) -> Ended:
    """Run the same as a user would by hand, its output in files too."""
    with (folder / "plain_out").open("w") as out, (folder / "plain_err").open("w") as err:
        done = subprocess.run(
            command_line(wanted, sys.executable),
            env=dict(wanted.env),
            cwd=wanted.cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            timeout=DEADLINE_S,
            check=False,
        )
    texts = ((folder / name).read_text() for name in ("plain_out", "plain_err"))
    return Ended(done.returncode, *texts)


async def ended(process: WorkerProcess) -> int:
    return await asyncio.wait_for(process.wait(), DEADLINE_S)
